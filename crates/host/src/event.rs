//! Interrupt vectors that are event descriptors: what an emulated SSD raises and a driver sleeps on.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use base::{Interrupts, Span};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

/// The vectors of one device, one event descriptor each. Cheap to clone; every clone raises and
/// waits for the same vectors.
#[derive(Clone, Debug)]
pub struct EventVectors {
    descriptors: Arc<[OwnedFd]>,
}

impl EventVectors {
    /// Makes `count` vectors. Each takes one of the process's descriptors.
    pub fn new(count: u16) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let descriptors: Result<Vec<_>, Errno> = (0..count).map(|_| eventfd(0, flags)).collect();
        Ok(Self { descriptors: descriptors?.into() })
    }

    /// How many vectors there are.
    pub fn count(&self) -> usize {
        self.descriptors.len()
    }

    /// The descriptor of a vector, to be given to whoever waits on many things.
    pub fn descriptor(&self, vector: u16) -> Option<BorrowedFd<'_>> {
        self.descriptors.get(usize::from(vector)).map(AsFd::as_fd)
    }

    /// Takes the signals of a vector away, and says whether there were any. To sleep without missing
    /// one: clear, look once more for work, and only then [`wait`](Self::wait).
    pub fn clear(&self, vector: u16) -> bool {
        let mut count = [0; 8];
        let read = |descriptor| rustix::io::read(descriptor, &mut count);
        // Anything but a count is EAGAIN: not signalled.
        self.descriptor(vector).map(read).is_some_and(|read| read == Ok(8))
    }

    /// Sleeps until a vector is signalled or `timeout` has passed, and says which it was. The
    /// signals are taken away.
    pub fn wait(&self, vector: u16, timeout: Span) -> io::Result<bool> {
        let descriptor = self.descriptor(vector).ok_or(io::ErrorKind::InvalidInput)?;
        let mut entries = [PollFd::new(&descriptor, PollFlags::IN)];
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout.ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(timeout.ns % 1_000_000_000).unwrap_or(0),
        };
        match poll(&mut entries, Some(&timeout)) {
            Ok(_) => Ok(self.clear(vector)),
            // A signal handler ran: as good a reason to look around as any.
            Err(Errno::INTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Interrupts for EventVectors {
    fn raise(&mut self, vector: u16) {
        let Some(descriptor) = self.descriptor(vector) else { return };
        // The only refusal is EAGAIN, when 2^64 − 2 signals have not been taken yet: then it is
        // signalled, which is all that was wanted.
        let written = rustix::io::write(descriptor, &1_u64.to_ne_bytes());
        debug_assert!(matches!(written, Ok(8) | Err(Errno::AGAIN)), "{written:?}");
    }
}

#[cfg(test)]
mod tests {
    use base::{Interrupts, Span};

    use super::EventVectors;

    #[test]
    fn signals_merge_and_none_is_lost() {
        let mut vectors = EventVectors::new(3).unwrap();
        vectors.raise(1);
        vectors.raise(1);
        assert!(!vectors.clear(0), "the neighbour is silent");
        assert!(vectors.clear(1));
        assert!(!vectors.clear(1), "two signals before a look are one");
        vectors.raise(1);
        assert!(vectors.wait(1, Span::default()).unwrap());
    }

    #[test]
    fn a_wait_for_a_silent_vector_ends_by_its_timeout() {
        let vectors = EventVectors::new(1).unwrap();
        assert!(!vectors.wait(0, Span::from_ms(1)).unwrap());
    }

    #[test]
    fn a_signal_from_another_thread_ends_a_wait() {
        let vectors = EventVectors::new(1).unwrap();
        let mut theirs = vectors.clone();
        let raiser = std::thread::spawn(move || theirs.raise(0));
        assert!(vectors.wait(0, Span::from_secs(10)).unwrap());
        raiser.join().unwrap();
    }

    #[test]
    fn a_vector_that_does_not_exist_is_never_signalled() {
        let mut vectors = EventVectors::new(1).unwrap();
        vectors.raise(1);
        assert!(!vectors.clear(1) && !vectors.clear(0));
        assert!(vectors.wait(1, Span::default()).is_err());
        assert_eq!(vectors.count(), 1);
    }
}
