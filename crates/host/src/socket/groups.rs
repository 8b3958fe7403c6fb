//! Who polls a receive queue: one socket for all of those whose packets come by it.
//!
//! ```text
//!   receive queue 8193 ─┬─ socket a
//!                       ├─ socket b
//!                       └─ socket c, the newest: SO_BUSY_POLL. A look at it takes what has come for all
//! ```
//!
//! A look at a socket with `SO_BUSY_POLL` that finds nothing polls the receive queue (NAPI) that its
//! last packet came by, and whatever is found there goes to its own socket. That a second socket
//! behind the same queue does so again is work for nothing. Which queue it is the kernel says
//! (`SO_INCOMING_NAPI_ID`); without one, as on loopback, a socket is in no group and there is nothing
//! to poll. The newest polls, because a connection that others came after (that of an admin queue) is
//! looked at least.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::Span;

use super::options::{self, Placement};

/// Groups of sockets by the receive queue that they are behind. A handle.
#[derive(Clone, Debug, Default)]
pub(super) struct Groups {
    table: Arc<Mutex<Table>>,
}

#[derive(Default)]
struct Table {
    /// By the number of the queue, oldest first.
    groups: BTreeMap<u32, Vec<Entry>>,
    next: u64,
}

struct Entry {
    number: u64,
    /// A descriptor of its own, so that it is there for as long as the entry is.
    socket: OwnedFd,
    busy: Span,
}

/// A socket's place in its group. It is to go with the socket.
#[derive(Debug)]
pub(super) struct Member {
    groups: Groups,
    queue: u32,
    number: u64,
}

impl Groups {
    /// A socket that polls for so long, and has been connected. `None` if it is behind no queue that
    /// is known by a number, or no descriptor is left: then it polls for itself, as it was told.
    pub(super) fn join(&self, socket: BorrowedFd<'_>, busy: Span) -> Option<Member> {
        self.join_at(Placement::of(socket).napi_id?, socket, busy)
    }

    fn join_at(&self, queue: u32, socket: BorrowedFd<'_>, busy: Span) -> Option<Member> {
        let socket = socket.try_clone_to_owned().ok()?;
        let mut table = self.table();
        let number = table.next;
        table.next += 1;
        let group = table.groups.entry(queue).or_default();
        if let Some(before) = group.last() {
            before.poll(Span::default());
        }
        group.push(Entry { number, socket, busy });
        Some(Member { groups: self.clone(), queue, number })
    }

    /// The queues there are, and how many sockets are behind each.
    pub(super) fn sizes(&self) -> Vec<(u32, usize)> {
        self.table().groups.iter().map(|(queue, group)| (*queue, group.len())).collect()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    /// Has it poll for so long from now on. Where that is refused it goes on as before.
    fn poll(&self, busy: Span) {
        let _ = options::set_busy_poll(self.socket.as_fd(), busy);
    }
}

impl Drop for Member {
    /// If it was the one that polls, the one before it does from now on.
    fn drop(&mut self) {
        let mut table = self.groups.table();
        let Some(group) = table.groups.get_mut(&self.queue) else { return };
        let was_last = group.last().is_some_and(|last| last.number == self.number);
        group.retain(|entry| entry.number != self.number);
        match group.last() {
            Some(last) if was_last => last.poll(last.busy),
            Some(_) => {}
            None => _ = table.groups.remove(&self.queue),
        }
    }
}

impl fmt::Debug for Table {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes = self.groups.iter().map(|(queue, group)| (queue, group.len()));
        out.debug_map().entries(sizes).finish()
    }
}

#[cfg(test)]
mod tests;
