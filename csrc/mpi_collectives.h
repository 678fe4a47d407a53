// The MPI library's own collectives, to race against. They block, where neither a signal nor a deadline reaches them:
// all ranks must be on their way into the same one. What each leaves is said in hpdl_lab/comm/base.py.
// All throw std::invalid_argument for memory that does not fit, before any message, and MpiError.
#pragma once

#include "dtype.h"
#include "message.h"

namespace hpdl::mpi {

void all_reduce(const Group& group, const Buffer& x, const Buffer& out);      // in place where they are the same
void reduce_scatter(const Group& group, const Buffer& x, const Buffer& out);  // x: size rows like out
void all_gather(const Group& group, const Buffer& x, const Buffer& out);      // out: size rows like x
void all_to_all(const Group& group, const Buffer& x, const Buffer& out);      // size rows each
void broadcast(const Group& group, const Buffer& x, int root);
void reduce(const Group& group, const Buffer& x, const Buffer& out, int root);   // out: of the root alone
void gather(const Group& group, const Buffer& x, const Buffer& out, int root);   // out: of the root alone
void scatter(const Group& group, const Buffer& x, const Buffer& out, int root);  // x: of the root alone

}  // namespace hpdl::mpi
