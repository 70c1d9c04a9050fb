# The environment of deep_ep, made by `deep_ep env` --profile gke-a4. The library also works with no variable set.
# detected: the automatic choice for this machine's GPUs and NICs
export DEEP_EP_DEVICE_TO_HCA_MAPPING='0:mlx5_0:1,1:mlx5_1:1,2:mlx5_2:1,3:mlx5_3:1,4:mlx5_4:1,5:mlx5_5:1,6:mlx5_6:1,7:mlx5_7:1'
# profile gke-a4: the class that this network carries RDMA in, gIB's NCCL_IB_TC
export DEEP_EP_RDMA_TRAFFIC_CLASS='52'
# set
export NCCL_CROSS_NIC='2'
# profile gke-a4: the plug-in's libraries, last
export LD_LIBRARY_PATH='/usr/local/nvidia/lib64:/usr/local/gib/lib64'
# NCCL: the plug-in's own script is on this machine, and wins over the profile.
if [ -r '/usr/local/gib/scripts/set_nccl_env.sh' ]; then . '/usr/local/gib/scripts/set_nccl_env.sh'; fi
# gIB refuses to start beside it: "NCCL/NET (shim) mismatch recommended".
unset TORCH_NCCL_USE_COMM_NONBLOCKING
