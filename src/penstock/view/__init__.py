"""Look at recordings and datasets in a browser, offline; mark what to keep and what to reject."""
