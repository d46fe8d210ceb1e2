"""`gpu-node`, the node's own command: the one owner of balancer membership and of the switch of releases."""
