//! Interrupt vectors that are event descriptors: what an emulated SSD raises and a driver sleeps on.
//!
//! A vector is masked while its host polls, and then costs the device one load per signal. A host
//! that goes to sleep unmasks it and looks once more; the next signal writes to the descriptor and
//! masks the vector again, so that a sleep costs one write however much comes. That nothing is
//! missed between the look and the sleep is the same handshake as a bell's.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use base::{Interrupts, Span};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use crate::barrier::Barrier;
use crate::bell::Handshake;

/// The vectors of one device, one event descriptor each. Cheap to clone; every clone raises and
/// waits for the same vectors.
#[derive(Clone, Debug)]
pub struct EventVectors {
    vectors: Arc<[Shared]>,
}

/// One vector, as the host has it that sleeps on it.
#[derive(Debug)]
pub struct EventVector {
    vectors: EventVectors,
    number: u16,
}

/// An event descriptor of somebody else, who sleeps on it.
#[derive(Debug)]
pub struct Line {
    descriptor: OwnedFd,
}

/// On a line of its own: the device looks at the flag each time it signals.
#[derive(Debug)]
#[repr(align(64))]
struct Shared {
    handshake: Handshake,
    descriptor: OwnedFd,
}

impl Line {
    /// A line to whoever has sent `descriptor`.
    ///
    /// # Errors
    ///
    /// If it is anything but an event descriptor, to which a write could wait for ever.
    pub fn new(descriptor: OwnedFd) -> io::Result<Self> {
        let name = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
        let found = rustix::fs::readlink(name, Vec::new())?;
        if found.as_bytes() != b"anon_inode:[eventfd]" {
            let found = found.to_string_lossy();
            let text = format!("a descriptor is {found}, expected anon_inode:[eventfd]");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        rustix::io::ioctl_fionbio(&descriptor, true)?;
        Ok(Self { descriptor })
    }

    /// A descriptor that nobody has yet: one end to wait on, and a line to it.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub fn pair() -> io::Result<(OwnedFd, Self)> {
        let descriptor = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok((descriptor.try_clone()?, Self { descriptor }))
    }

    /// Signals whoever waits. Signals merge.
    pub fn signal(&self) {
        // A full counter is a signal that was not taken yet.
        let _ = rustix::io::write(&self.descriptor, &1_u64.to_ne_bytes());
    }

    /// Takes the signals of somebody else away, and says whether there were any.
    pub fn clear(&self) -> bool {
        // Anything but a count is EAGAIN: not signalled.
        rustix::io::read(&self.descriptor, &mut [0; 8]) == Ok(8)
    }
}

impl AsFd for Line {
    /// Readable while it is signalled.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl EventVectors {
    /// Makes `count` vectors, all unmasked. Each takes one of the process's descriptors.
    pub fn new(count: u16) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let barrier = Barrier::detect();
        let vector = |_| {
            let handshake = Handshake::new(barrier);
            // Nobody signals yet, so it does not matter whether there was a barrier.
            handshake.announce();
            Ok(Shared { handshake, descriptor: eventfd(0, flags)? })
        };
        let vectors: Result<Vec<_>, Errno> = (0..count).map(vector).collect();
        Ok(Self { vectors: vectors?.into() })
    }

    /// How many vectors there are.
    pub fn count(&self) -> usize {
        self.vectors.len()
    }

    /// The host's end of a vector, which it begins by masking: it polls.
    pub fn vector(&self, number: u16) -> Option<EventVector> {
        self.shared(number)?.handshake.withdraw();
        Some(EventVector { vectors: self.clone(), number })
    }

    /// The descriptor of a vector, to be given to whoever waits on many things.
    pub fn descriptor(&self, vector: u16) -> Option<BorrowedFd<'_>> {
        self.shared(vector).map(|vector| vector.descriptor.as_fd())
    }

    /// Takes the signals of a vector away, and says whether there were any.
    pub fn clear(&self, vector: u16) -> bool {
        let mut count = [0; 8];
        let read = |descriptor| rustix::io::read(descriptor, &mut count);
        // Anything but a count is EAGAIN: not signalled.
        self.descriptor(vector).map(read).is_some_and(|read| read == Ok(8))
    }

    /// Takes old signals away and asks for the next one. To sleep without missing anything: unmask,
    /// look once more for work, and only then [`wait`](Self::wait). False if the kernel refuses the
    /// barrier that this rests on, or there is no such vector: then go on looking.
    pub fn unmask(&self, vector: u16) -> bool {
        self.clear(vector);
        self.shared(vector).is_some_and(|vector| vector.handshake.announce())
    }

    /// Asks for no signals. One that is under way may still come.
    pub fn mask(&self, vector: u16) {
        if let Some(vector) = self.shared(vector) {
            vector.handshake.withdraw();
        }
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

    #[inline]
    fn shared(&self, vector: u16) -> Option<&Shared> {
        self.vectors.get(usize::from(vector))
    }
}

impl Interrupts for EventVectors {
    #[inline]
    fn raise(&mut self, vector: u16) {
        if let Some(vector) = self.shared(vector)
            && vector.handshake.claim()
        {
            vector.signal();
        }
    }
}

impl Shared {
    #[cold]
    fn signal(&self) {
        // The only refusal is EAGAIN, when 2^64 − 2 signals have not been taken yet: then it is
        // signalled, which is all that was wanted.
        let written = rustix::io::write(&self.descriptor, &1_u64.to_ne_bytes());
        debug_assert!(matches!(written, Ok(8) | Err(Errno::AGAIN)), "{written:?}");
    }
}

impl base::Vector for EventVector {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.vectors.vectors[usize::from(self.number)].descriptor.as_fd()
    }

    fn unmask(&mut self) -> bool {
        self.vectors.unmask(self.number)
    }

    fn mask(&mut self) {
        self.vectors.mask(self.number);
    }
}

#[cfg(test)]
mod tests {
    use base::{Interrupts, Span, Vector};

    use super::{EventVectors, Line};

    #[test]
    fn a_host_that_polls_is_not_signalled() {
        let mut vectors = EventVectors::new(1).unwrap();
        let mut vector = vectors.vector(0).unwrap();
        vectors.raise(0);
        assert!(!vectors.clear(0), "masked from the beginning");
        assert!(vector.unmask());
        vector.mask();
        vectors.raise(0);
        assert!(!vectors.clear(0));
    }

    #[test]
    fn the_first_signal_of_a_sleep_is_written_and_no_other() {
        let mut vectors = EventVectors::new(3).unwrap();
        vectors.raise(1);
        vectors.raise(1);
        assert!(!vectors.clear(0), "the neighbour is silent");
        assert!(vectors.clear(1));
        vectors.raise(1);
        assert!(!vectors.clear(1), "until it is unmasked again");
        assert!(vectors.unmask(1));
        vectors.raise(1);
        assert!(vectors.wait(1, Span::default()).unwrap());
    }

    #[test]
    fn unmasking_takes_old_signals_away() {
        let mut vectors = EventVectors::new(1).unwrap();
        let mut vector = vectors.vector(0).unwrap();
        assert!(vector.unmask());
        vectors.raise(0);
        assert!(vector.unmask());
        assert!(!vectors.wait(0, Span::default()).unwrap());
        vectors.raise(0);
        vector.mask();
        assert!(vectors.wait(0, Span::default()).unwrap(), "what was signalled stays so");
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
    fn a_line_signals_who_has_sent_it_and_is_nothing_but_an_event_descriptor() {
        let (waiting, line) = Line::pair().unwrap();
        let sent = Line::new(waiting.try_clone().unwrap()).unwrap();
        line.signal();
        sent.signal();
        let mut count = [0; 8];
        assert_eq!(rustix::io::read(&waiting, &mut count), Ok(8));
        assert_eq!(u64::from_ne_bytes(count), 2);
        let (pipe, _other) = std::io::pipe().unwrap();
        let refused = Line::new(pipe.into()).unwrap_err().to_string();
        assert!(refused.contains("pipe:") && refused.contains("expected"), "{refused}");
    }

    #[test]
    fn a_vector_that_does_not_exist_is_never_signalled() {
        let mut vectors = EventVectors::new(1).unwrap();
        assert!(!vectors.unmask(1));
        vectors.raise(1);
        assert!(!vectors.clear(1) && !vectors.clear(0));
        assert!(vectors.wait(1, Span::default()).is_err() && vectors.vector(1).is_none());
        assert_eq!(vectors.count(), 1);
    }
}
