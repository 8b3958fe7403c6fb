//! Size of the descriptor table.
//!
//! The kernel doubles the descriptor table of a process when it is full. In a multithreaded process
//! the thread that triggers this waits for an RCU grace period, and every other thread that opens a
//! descriptor meanwhile waits with it: milliseconds on an idle machine, two to four seconds under a
//! compile load. A reactor that accepts its thousandth connection must not stall for that.
//! Therefore the table is grown before threads start, and the soft RLIMIT_NOFILE is raised to the
//! hard limit; the usual low soft limit protects programs that call `select`.

use std::fs::File;

use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors for which the table is pre-sized. Costs half a MiB of kernel memory. A target needs
/// five descriptors per connection.
pub const DESCRIPTORS_RESERVED: u64 = 65_536;

/// Raises the soft RLIMIT_NOFILE to the hard limit and grows the table to [`DESCRIPTORS_RESERVED`] descriptors, or
/// to the limit if that is lower. Returns the resulting limit.
///
/// Call before threads are started; later calls block themselves. A refusal by the kernel is
/// ignored: the table then grows on demand.
pub fn reserve_fds() -> u64 {
    let before = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: before.maximum, ..before };
    let limit = if setrlimit(Resource::Nofile, raised).is_ok() { raised } else { before };
    let count = limit.current.unwrap_or(u64::MAX);
    let last = i32::try_from(count.min(DESCRIPTORS_RESERVED)).unwrap_or(i32::MAX).saturating_sub(1);
    if let Ok(any) = File::open("/") {
        // The table keeps the size that this duplicate requires; the duplicate is closed at once.
        drop(fcntl_dupfd_cloexec(&any, last));
    }
    count
}
