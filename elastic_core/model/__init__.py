"""The words of the product as frozen types: jobs, nodes, generations, failures, progress."""
