// All of a Hopper GPU that a kernel does not see: the text of a library.
#pragma once

#define SIMT_MACHINE
#include "simt_state.h"
#include "simt_threads.h"
#include "simt_memory.h"
#include "simt_lanes.h"
#include "simt_copies.h"
#include "simt_wgmma.h"
