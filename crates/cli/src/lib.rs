//! The program `tenmil`: its commands, and what they run.
//!
//! | module | contents |
//! |---|---|
//! | [`commands`] | command-line interface |
//! | [`copy`] | copy of one block device to another |
//! | [`proxy`] | TCP proxy with fault injection |
//! | `io_rates` | rates between two samples of I/O statistics, for `iostat` and `top` |
//! | `top` | live display of a running process |

#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod commands;
pub mod copy;
mod flight_record;
mod io_rates;
mod process_log;
pub mod proxy;
mod top;
