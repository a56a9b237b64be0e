"""Inside a worker: the elastic API and the Classy Vision trainer on it."""
