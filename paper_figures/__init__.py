"""Tables and figures of the paper: result files in, one table or figure out."""
