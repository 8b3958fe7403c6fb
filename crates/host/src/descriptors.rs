//! Room for descriptors.
//!
//! The kernel keeps a table of what a process has open, and makes one of twice the size when it is
//! full. In a process with threads, whoever opened one too many then waits until every processor has
//! passed through a quiet state, and whoever opens anything meanwhile waits for him: milliseconds on
//! an idle machine, and two to four seconds were seen on one that compiles. A reactor that takes in
//! its thousandth connection must not stand still for that. So the table is made before there are
//! threads, and as many descriptors may be open as the administrator allows at all: the low limit
//! that is usual is for programs that call `select`.

use std::fs::File;

use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// For so many there is room from the start, and it takes half a MiB of the kernel's memory. Each
/// connection of a target needs five.
pub const ROOM: u64 = 65_536;

/// Lets this process open as many descriptors as it may at all, and makes room for [`ROOM`] of them,
/// or for as many as that is. How many may be open from now on. To be called before there are
/// threads; later it waits itself.
///
/// What the kernel refuses is left as it is: then there is less room, and it grows when it is full.
pub fn make_room() -> u64 {
    let before = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: before.maximum, ..before };
    let limit = if setrlimit(Resource::Nofile, raised).is_ok() { raised } else { before };
    let count = limit.current.unwrap_or(u64::MAX);
    let last = i32::try_from(count.min(ROOM)).unwrap_or(i32::MAX).saturating_sub(1);
    if let Ok(any) = File::open("/") {
        // The table stays as large as it is made for this one, which is closed at once.
        drop(fcntl_dupfd_cloexec(&any, last));
    }
    count
}
