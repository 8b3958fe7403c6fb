//! Waiting for many descriptors, for threads off the data path.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use tenmil_base::Span;

/// Set of descriptors to wait for, each identified by a token.
///
/// Level-triggered: what is not consumed is reported again. A closed descriptor leaves the set.
#[derive(Debug)]
pub struct PollSet {
    epoll: OwnedFd,
}

/// Ready descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadyDescriptor {
    /// Token of the descriptor.
    pub token: u64,
    /// Readable, or the peer has closed.
    pub readable: bool,
    /// Writable, or the peer has closed.
    pub writable: bool,
}

/// Events to wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interest {
    /// Readable.
    pub readable: bool,
    /// Writable.
    pub writable: bool,
}

/// Descriptors reported per wait; the rest is reported by the next.
const REPORTED_MAX: usize = 64;

impl PollSet {
    /// Creates an empty set.
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Self { epoll })
    }

    /// Adds a descriptor to the set. One that is a member already, because several channels have it
    /// in common, remains as it was.
    pub fn add(&self, descriptor: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        match epoll::add(&self.epoll, descriptor, data, epoll_flags(interest)) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Adds a descriptor that may itself be a set, of sets. Returns false if it lies too deep: the kernel limits
    /// how many sets lie in each other, above this one and below (`EP_MAX_NESTS` of `fs/eventpoll.c`, 4).
    pub fn add_nested(&self, set: impl AsFd, token: u64, interest: Interest) -> io::Result<bool> {
        let data = epoll::EventData::new_u64(token);
        match epoll::add(&self.epoll, set, data, epoll_flags(interest)) {
            Ok(()) | Err(Errno::EXIST) => Ok(true),
            Err(Errno::LOOP) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Changes the events of a descriptor in the set.
    pub fn modify(&self, descriptor: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        Ok(epoll::modify(&self.epoll, descriptor, data, epoll_flags(interest))?)
    }

    /// Removes a descriptor from the set. Removing one that is not a member is not an error.
    pub fn remove(&self, descriptor: impl AsFd) -> io::Result<()> {
        match epoll::delete(&self.epoll, descriptor) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Waits until a descriptor is ready or `timeout` has passed (`None`: without limit). Replaces
    /// the content of `found` by the ready descriptors. A signal handler also ends the wait.
    pub fn wait(&self, timeout: Option<Span>, found: &mut Vec<ReadyDescriptor>) -> io::Result<()> {
        found.clear();
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: i64::try_from(timeout.ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(timeout.ns % 1_000_000_000).unwrap_or(0),
        });
        let mut events = [const { MaybeUninit::uninit() }; REPORTED_MAX];
        match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            Ok((events, _)) => found.extend(events.iter().map(ready_from_event)),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        Ok(())
    }
}

impl AsFd for PollSet {
    /// Descriptor that is readable while any member is ready.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl From<PollSet> for OwnedFd {
    /// Converts the set to one descriptor that is readable while any member is ready.
    fn from(watch: PollSet) -> Self {
        watch.epoll
    }
}

fn epoll_flags(interest: Interest) -> epoll::EventFlags {
    let mut flags = epoll::EventFlags::empty();
    flags.set(epoll::EventFlags::IN | epoll::EventFlags::RDHUP, interest.readable);
    flags.set(epoll::EventFlags::OUT, interest.writable);
    flags
}

fn ready_from_event(event: &epoll::Event) -> ReadyDescriptor {
    use epoll::EventFlags as Flags;
    let found = event.flags;
    let over = found.intersects(Flags::HUP | Flags::ERR);
    ReadyDescriptor {
        token: event.data.u64(),
        readable: over || found.intersects(Flags::IN | Flags::RDHUP),
        writable: over || found.contains(Flags::OUT),
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Interrupts, Span};

    use super::{Interest, PollSet, ReadyDescriptor};
    use crate::EventFdVectors;
    use crate::local_socket::LocalConnection;

    const READABLE: Interest = Interest { readable: true, writable: false };
    const WRITABLE: Interest = Interest { readable: false, writable: true };
    const NOTHING: Interest = Interest { readable: false, writable: false };

    fn ready_tokens(watch: &PollSet, timeout: Option<Span>) -> Vec<ReadyDescriptor> {
        let mut found = Vec::new();
        watch.wait(timeout, &mut found).unwrap();
        found
    }

    #[test]
    fn ready_descriptor_is_reported_by_token_until_consumed() {
        let mut vectors = EventFdVectors::new(2).unwrap();
        let watch = PollSet::new().unwrap();
        watch.add(vectors.descriptor(0).unwrap(), 7, READABLE).unwrap();
        watch.add(vectors.descriptor(1).unwrap(), 9, READABLE).unwrap();
        assert_eq!(ready_tokens(&watch, Some(Span::default())), []);
        vectors.raise(1);
        let ready = ReadyDescriptor { token: 9, readable: true, writable: false };
        assert_eq!(ready_tokens(&watch, None), [ready]);
        assert_eq!(ready_tokens(&watch, None), [ready]);
        vectors.clear_signals(1);
        assert_eq!(ready_tokens(&watch, Some(Span::from_us(10))), []);
    }

    #[test]
    fn only_requested_events_are_reported() {
        let (one, other) = LocalConnection::pair().unwrap();
        let watch = PollSet::new().unwrap();
        watch.add(&one, 1, WRITABLE).unwrap();
        other.send(b"x").unwrap();
        assert_eq!(
            ready_tokens(&watch, None),
            [ReadyDescriptor { token: 1, readable: false, writable: true }]
        );
        watch.modify(&one, 1, NOTHING).unwrap();
        assert_eq!(ready_tokens(&watch, Some(Span::default())), []);
        drop(other);
        let over = ReadyDescriptor { token: 1, readable: true, writable: true };
        assert_eq!(ready_tokens(&watch, None), [over], "an end is always reported");
        drop(one);
        assert_eq!(ready_tokens(&watch, Some(Span::default())), []);
    }
}
