# deep_ep_cuda_architectures(VERSION RESULT): for which GPUs an nvcc of that version compiles; fails where it is too old.
function(deep_ep_cuda_architectures version result)
  if(version VERSION_LESS 12.4)
    message(FATAL_ERROR "nvcc ${version} is too old: 12.4 or later is needed, 13.0 is what is tested")
  endif()
  # Machine code for Hopper and for data-centre Blackwell, and PTX that all others compile at load time. Code for sm_100
  # loads on all GPUs of that family: 10.0 (B200, GB200) and 10.3 (B300, GB300). Code for sm_100a would load on 10.0
  # alone, and the kernels use nothing that only it has.
  set(architectures 90a-real 100-real 90-virtual)
  if(version VERSION_LESS 12.8)
    message(STATUS "nvcc ${version} does not know sm_100 (12.8 does): Blackwell GPUs compile the PTX when it is loaded")
    list(REMOVE_ITEM architectures 100-real)
  endif()
  set(${result} ${architectures} PARENT_SCOPE)
endfunction()
