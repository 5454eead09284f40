"""What an estimator costs, without running it on a device."""
