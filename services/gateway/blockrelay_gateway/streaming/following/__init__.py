"""The requests that this gateway follows: from ACCEPT, or from their record, to the end or to their last reader."""
