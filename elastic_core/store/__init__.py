"""The key-value store that nodes agree through: a protocol, its keys, and etcd v3."""
