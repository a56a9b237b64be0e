"""Elastic training of image classifiers on machines that come and go.

The library knows no orchestrator and no cloud: `rendezvous` and `planning`
decide, `agent` runs a node's workers, `trainer` runs inside a worker, `store`
speaks to etcd. Start reading at `model`.
"""
