#!/usr/bin/env bash
echo "replicas run in units of the node, not by this script" >&2
exit 1
