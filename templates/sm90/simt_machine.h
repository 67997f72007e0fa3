// All of a Hopper GPU that a kernel does not see; a part of sm90/simt.h. Behind SIMT_MACHINE it is the text of a library.
#pragma once

#include "simt_state.h"
#include "simt_threads.h"
#include "simt_memory.h"
#include "simt_copies.h"
#include "simt_wgmma.h"
