"""The search behind the tables of small-head laws; accounting itself only reads them."""
