"""Products of many rows with everything behind them in their last step: norm, bias, sum, activation."""
