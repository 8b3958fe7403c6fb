//! Busy-poll groups: one socket polls a receive queue for all sockets behind it.
//!
//! ```text
//!   receive queue 8193 ─┬─ socket a
//!                       ├─ socket b
//!                       └─ socket c, the newest: SO_BUSY_POLL. Its polls receive for all
//! ```
//!
//! A poll of a socket with `SO_BUSY_POLL` that finds nothing polls the receive queue (NAPI) of its
//! last packet, and packets found there are delivered to their own sockets. A second polling socket
//! behind the same queue would be redundant. The kernel reports the queue (`SO_INCOMING_NAPI_ID`);
//! a socket without one, as on loopback, is in no group. The newest socket polls, because the
//! oldest (that of an admin queue) is polled least often.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::Span;

use super::socket_options::{self, RxPlacement};

/// Sockets grouped by receive queue. A shared handle.
#[derive(Clone, Debug, Default)]
pub(super) struct NapiGroups {
    table: Arc<Mutex<GroupTable>>,
}

#[derive(Default)]
struct GroupTable {
    /// Groups by NAPI identifier, oldest socket first.
    groups: BTreeMap<u32, Vec<NapiGroup>>,
    next: u64,
}

struct NapiGroup {
    number: u64,
    /// A duplicated descriptor, so that it is valid as long as the entry.
    socket: OwnedFd,
    busy: Span,
}

/// Membership of a socket in its group. Drop it with the socket.
#[derive(Debug)]
pub(super) struct GroupMembership {
    groups: NapiGroups,
    queue: u32,
    number: u64,
}

impl NapiGroups {
    /// Adds a connected socket that busy-polls for `busy`. `None` if its receive queue is unknown,
    /// or no descriptor is left: then it polls for itself.
    pub(super) fn join_group(&self, socket: BorrowedFd<'_>, busy: Span) -> Option<GroupMembership> {
        self.join_group_of_queue(RxPlacement::of_socket(socket).napi_id?, socket, busy)
    }

    fn join_group_of_queue(
        &self,
        queue: u32,
        socket: BorrowedFd<'_>,
        busy: Span,
    ) -> Option<GroupMembership> {
        let socket = socket.try_clone_to_owned().ok()?;
        let mut table = self.lock_table();
        let number = table.next;
        table.next += 1;
        let group = table.groups.entry(queue).or_default();
        if let Some(before) = group.last() {
            before.set_busy_poll(Span::default());
        }
        group.push(NapiGroup { number, socket, busy });
        Some(GroupMembership { groups: self.clone(), queue, number })
    }

    /// Receive queues, with the number of sockets behind each.
    pub(super) fn group_sizes(&self) -> Vec<(u32, usize)> {
        self.lock_table().groups.iter().map(|(queue, group)| (*queue, group.len())).collect()
    }

    fn lock_table(&self) -> MutexGuard<'_, GroupTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NapiGroup {
    /// Changes the busy-poll duration. On failure it stays as it was.
    fn set_busy_poll(&self, busy: Span) {
        let _ = socket_options::set_busy_poll(self.socket.as_fd(), busy);
    }
}

impl Drop for GroupMembership {
    /// Moves the busy polling to the previous socket if this one polled.
    fn drop(&mut self) {
        let mut table = self.groups.lock_table();
        let Some(group) = table.groups.get_mut(&self.queue) else { return };
        let was_last = group.last().is_some_and(|last| last.number == self.number);
        group.retain(|entry| entry.number != self.number);
        match group.last() {
            Some(last) if was_last => last.set_busy_poll(last.busy),
            Some(_) => {}
            None => _ = table.groups.remove(&self.queue),
        }
    }
}

impl fmt::Debug for GroupTable {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes = self.groups.iter().map(|(queue, group)| (queue, group.len()));
        out.debug_map().entries(sizes).finish()
    }
}

#[cfg(test)]
mod tests;
