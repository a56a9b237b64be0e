"""A script that ends well at once."""
