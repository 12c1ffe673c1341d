"""Generated from `protos/gateway/v1` by `tools/protos.sh`; everything else in this folder is overwritten."""
