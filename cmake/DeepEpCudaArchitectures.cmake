# deep_ep_cuda_architectures(VERSION RESULT): for which GPUs an nvcc of that version compiles; fails where it is too old.
function(deep_ep_cuda_architectures version result)
  if(version VERSION_LESS 12.4)
    message(FATAL_ERROR "nvcc ${version} is too old: 12.4 or later is needed, 13.0 is what is tested")
  endif()
  # Machine code for Hopper and Blackwell data-centre GPUs, and PTX that newer ones compile at load time.
  set(architectures 90a-real 100a-real 90-virtual)
  if(version VERSION_LESS 12.8)
    message(STATUS "nvcc ${version} does not know sm_100a (12.8 does): Blackwell GPUs compile the PTX when it is loaded")
    list(REMOVE_ITEM architectures 100a-real)
  endif()
  set(${result} ${architectures} PARENT_SCOPE)
endfunction()
