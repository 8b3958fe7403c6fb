//! Waiting for many descriptors at once, for threads off the data path.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use base::Span;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

/// A set of descriptors that a thread can wait for. Each has a token to be known by.
///
/// Level-triggered: what is not taken is reported again. A descriptor that is closed leaves the set.
#[derive(Debug)]
pub struct Watch {
    epoll: OwnedFd,
}

/// A descriptor that wants attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// Its token.
    pub token: u64,
    /// There is something to receive, or the other side has gone.
    pub readable: bool,
    /// There is room to send into, or the other side has gone.
    pub writable: bool,
}

/// What to wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interest {
    /// Something to receive.
    pub readable: bool,
    /// Room to send into.
    pub writable: bool,
}

/// As many are reported at once; the rest the next time.
const REPORTED_MAX: usize = 64;

impl Watch {
    /// An empty set.
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Self { epoll })
    }

    /// Puts a descriptor into the set.
    pub fn add(&self, descriptor: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        Ok(epoll::add(&self.epoll, descriptor, data, flags(interest))?)
    }

    /// Waits for something else of a descriptor in the set.
    pub fn change(&self, descriptor: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        Ok(epoll::modify(&self.epoll, descriptor, data, flags(interest))?)
    }

    /// Takes a descriptor out of the set. One that is not in it is none.
    pub fn remove(&self, descriptor: impl AsFd) -> io::Result<()> {
        match epoll::delete(&self.epoll, descriptor) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Waits until a descriptor wants attention or `timeout` has passed; without one, for as long
    /// as it takes. Puts those that do into `found`, in place of what was there. A signal handler
    /// that ran ends the wait too.
    pub fn wait(&self, timeout: Option<Span>, found: &mut Vec<Ready>) -> io::Result<()> {
        found.clear();
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: i64::try_from(timeout.ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(timeout.ns % 1_000_000_000).unwrap_or(0),
        });
        let mut events = [const { MaybeUninit::uninit() }; REPORTED_MAX];
        match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            Ok((events, _)) => found.extend(events.iter().map(ready)),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        Ok(())
    }
}

impl AsFd for Watch {
    /// Readable while any descriptor in the set is as was asked for.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl From<Watch> for OwnedFd {
    /// The set as one descriptor, which is readable while any of those in it is as was asked for.
    fn from(watch: Watch) -> Self {
        watch.epoll
    }
}

fn flags(interest: Interest) -> epoll::EventFlags {
    let mut flags = epoll::EventFlags::empty();
    flags.set(epoll::EventFlags::IN | epoll::EventFlags::RDHUP, interest.readable);
    flags.set(epoll::EventFlags::OUT, interest.writable);
    flags
}

fn ready(event: &epoll::Event) -> Ready {
    use epoll::EventFlags as Flags;
    let found = event.flags;
    let over = found.intersects(Flags::HUP | Flags::ERR);
    Ready {
        token: event.data.u64(),
        readable: over || found.intersects(Flags::IN | Flags::RDHUP),
        writable: over || found.contains(Flags::OUT),
    }
}

#[cfg(test)]
mod tests {
    use base::{Interrupts, Span};

    use super::{Interest, Ready, Watch};
    use crate::EventVectors;
    use crate::local_socket::Connection;

    const READABLE: Interest = Interest { readable: true, writable: false };
    const WRITABLE: Interest = Interest { readable: false, writable: true };
    const NOTHING: Interest = Interest { readable: false, writable: false };

    fn found(watch: &Watch, timeout: Option<Span>) -> Vec<Ready> {
        let mut found = Vec::new();
        watch.wait(timeout, &mut found).unwrap();
        found
    }

    #[test]
    fn what_is_ready_is_reported_by_its_token_until_it_is_taken() {
        let mut vectors = EventVectors::new(2).unwrap();
        let watch = Watch::new().unwrap();
        watch.add(vectors.descriptor(0).unwrap(), 7, READABLE).unwrap();
        watch.add(vectors.descriptor(1).unwrap(), 9, READABLE).unwrap();
        assert_eq!(found(&watch, Some(Span::default())), []);
        vectors.raise(1);
        let ready = Ready { token: 9, readable: true, writable: false };
        assert_eq!(found(&watch, None), [ready]);
        assert_eq!(found(&watch, None), [ready]);
        vectors.clear(1);
        assert_eq!(found(&watch, Some(Span::from_us(10))), []);
    }

    #[test]
    fn only_what_is_asked_for_is_reported() {
        let (one, other) = Connection::pair().unwrap();
        let watch = Watch::new().unwrap();
        watch.add(&one, 1, WRITABLE).unwrap();
        other.send(b"x").unwrap();
        assert_eq!(found(&watch, None), [Ready { token: 1, readable: false, writable: true }]);
        watch.change(&one, 1, NOTHING).unwrap();
        assert_eq!(found(&watch, Some(Span::default())), []);
        drop(other);
        let over = Ready { token: 1, readable: true, writable: true };
        assert_eq!(found(&watch, None), [over], "an end is always reported");
        drop(one);
        assert_eq!(found(&watch, Some(Span::default())), []);
    }
}
