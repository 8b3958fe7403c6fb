//! Interrupt vectors backed by eventfds: raised by an emulated SSD, waited for by a driver.
//!
//! A vector is masked while its host polls, and then a signal costs the device one load. A host
//! that is about to sleep unmasks the vector and checks once more; the next signal writes to the
//! eventfd and masks the vector again, so that a sleep costs one write regardless of the number of
//! signals. The sleep/wake-up protocol of [`wakeup`](crate::wakeup) prevents lost signals.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use tenmil_base::{Interrupts, Span};

use crate::asymmetric_barrier::AsymmetricBarrier;
use crate::wakeup::SleepFlag;

/// Interrupt vectors of one device, one eventfd each. Cheap to clone; all clones share the same
/// vectors.
#[derive(Clone, Debug)]
pub struct EventFdVectors {
    vectors: Arc<[VectorState]>,
}

/// Host side of one vector.
#[derive(Debug)]
pub struct EventFdVector {
    vectors: EventFdVectors,
    number: u16,
}

/// Eventfd received from another process.
#[derive(Debug)]
pub struct RemoteEventFd {
    descriptor: OwnedFd,
}

/// State of a vector. On a cache line of its own: the device loads the flag at each signal.
#[derive(Debug)]
#[repr(align(64))]
struct VectorState {
    sleep_flag: SleepFlag,
    descriptor: OwnedFd,
}

impl RemoteEventFd {
    /// Wraps `descriptor`, received from another process.
    ///
    /// # Errors
    ///
    /// If it is not an eventfd; a write to another kind of descriptor could block.
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

    /// Creates an eventfd: the waiting end, and a `RemoteEventFd` to signal it.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn pair() -> io::Result<(OwnedFd, Self)> {
        let descriptor = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok((descriptor.try_clone()?, Self { descriptor }))
    }

    /// Signals the waiting side. Signals coalesce.
    pub fn signal(&self) {
        // A full counter is a signal that was not consumed yet.
        let _ = rustix::io::write(&self.descriptor, &1_u64.to_ne_bytes());
    }

    /// Consumes pending signals and returns whether there were any.
    pub fn clear_signals(&self) -> bool {
        // Anything but a count is EAGAIN: not signaled.
        rustix::io::read(&self.descriptor, &mut [0; 8]) == Ok(8)
    }
}

impl AsFd for RemoteEventFd {
    /// Descriptor that is readable while signaled.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl EventFdVectors {
    /// Creates `count` vectors, all unmasked. Each uses one descriptor.
    pub fn new(count: u16) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let barrier = AsymmetricBarrier::detect();
        let vector = |_| {
            let handshake = SleepFlag::new(barrier);
            // No other thread signals yet, so a refused barrier does not matter.
            handshake.announce();
            Ok(VectorState { sleep_flag: handshake, descriptor: eventfd(0, flags)? })
        };
        let vectors: Result<Vec<_>, Errno> = (0..count).map(vector).collect();
        Ok(Self { vectors: vectors?.into() })
    }

    /// Number of vectors.
    pub fn vector_count(&self) -> usize {
        self.vectors.len()
    }

    /// Returns the host side of a vector, masked: the host polls at first.
    pub fn vector(&self, number: u16) -> Option<EventFdVector> {
        self.vector_state(number)?.sleep_flag.cancel();
        Some(EventFdVector { vectors: self.clone(), number })
    }

    /// Descriptor of a vector, for waiting on several sources.
    pub fn descriptor(&self, vector: u16) -> Option<BorrowedFd<'_>> {
        self.vector_state(vector).map(|vector| vector.descriptor.as_fd())
    }

    /// Consumes pending signals of a vector and returns whether there were any.
    pub fn clear_signals(&self, vector: u16) -> bool {
        self.take_signal_count(vector) > 0
    }

    /// Consumes pending signals of a vector and returns how many there were, as a foreign library counts them that
    /// signals the descriptor itself.
    pub fn take_signal_count(&self, vector: u16) -> u64 {
        let mut count = [0; 8];
        let read = |descriptor| rustix::io::read(descriptor, &mut count);
        // Anything but a count is EAGAIN: not signaled.
        match self.descriptor(vector).map(read) {
            Some(Ok(8)) => u64::from_ne_bytes(count),
            _ => 0,
        }
    }

    /// Unmasks a vector after consuming old signals.
    ///
    /// To sleep without missing a signal: unmask, check for work once more, then
    /// [`wait_for_signal`](Self::wait_for_signal). Returns false if the kernel refuses the required barrier or the vector
    /// does not exist: then keep polling.
    pub fn unmask(&self, vector: u16) -> bool {
        self.clear_signals(vector);
        self.vector_state(vector).is_some_and(|vector| vector.sleep_flag.announce())
    }

    /// Masks a vector. A signal in progress may still arrive.
    pub fn mask(&self, vector: u16) {
        if let Some(vector) = self.vector_state(vector) {
            vector.sleep_flag.cancel();
        }
    }

    /// Sleeps until a vector is signaled or `timeout` has passed, and returns whether it was
    /// signaled. Consumes the signals.
    pub fn wait_for_signal(&self, vector: u16, timeout: Span) -> io::Result<bool> {
        let descriptor = self.descriptor(vector).ok_or(io::ErrorKind::InvalidInput)?;
        let mut entries = [PollFd::new(&descriptor, PollFlags::IN)];
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout.ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(timeout.ns % 1_000_000_000).unwrap_or(0),
        };
        match poll(&mut entries, Some(&timeout)) {
            Ok(_) => Ok(self.clear_signals(vector)),
            // Interrupted by a signal handler: a spurious return, which callers handle.
            Err(Errno::INTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Signals a vector whether its host sleeps or not, and whatever else signals its descriptor: for
    /// events so rare that a needless wake-up does not matter.
    pub fn signal(&self, vector: u16) {
        if let Some(vector) = self.vector_state(vector) {
            vector.signal();
        }
    }

    #[inline]
    fn vector_state(&self, vector: u16) -> Option<&VectorState> {
        self.vectors.get(usize::from(vector))
    }
}

impl Interrupts for EventFdVectors {
    #[inline]
    fn raise(&mut self, vector: u16) {
        if let Some(vector) = self.vector_state(vector)
            && vector.sleep_flag.claim_wakeup()
        {
            vector.signal();
        }
    }
}

impl VectorState {
    #[cold]
    fn signal(&self) {
        // The only error is EAGAIN, with 2^64 − 2 unconsumed signals: then the eventfd is readable
        // anyway.
        let written = rustix::io::write(&self.descriptor, &1_u64.to_ne_bytes());
        debug_assert!(matches!(written, Ok(8) | Err(Errno::AGAIN)), "{written:?}");
    }
}

impl tenmil_base::InterruptVector for EventFdVector {
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
    use tenmil_base::{InterruptVector, Interrupts, Span};

    use super::{EventFdVectors, RemoteEventFd};

    #[test]
    fn host_that_polls_is_not_signaled() {
        let mut vectors = EventFdVectors::new(1).unwrap();
        let mut vector = vectors.vector(0).unwrap();
        vectors.raise(0);
        assert!(!vectors.clear_signals(0), "masked from the beginning");
        assert!(vector.unmask());
        vector.mask();
        vectors.raise(0);
        assert!(!vectors.clear_signals(0));
    }

    #[test]
    fn only_the_first_signal_of_a_sleep_is_written() {
        let mut vectors = EventFdVectors::new(3).unwrap();
        vectors.raise(1);
        vectors.raise(1);
        assert!(!vectors.clear_signals(0), "the neighbour is silent");
        assert!(vectors.clear_signals(1));
        vectors.raise(1);
        assert!(!vectors.clear_signals(1), "until it is unmasked again");
        assert!(vectors.unmask(1));
        vectors.raise(1);
        assert!(vectors.wait_for_signal(1, Span::default()).unwrap());
    }

    #[test]
    fn unmasking_consumes_old_signals() {
        let mut vectors = EventFdVectors::new(1).unwrap();
        let mut vector = vectors.vector(0).unwrap();
        assert!(vector.unmask());
        vectors.raise(0);
        assert!(vector.unmask());
        assert!(!vectors.wait_for_signal(0, Span::default()).unwrap());
        vectors.raise(0);
        vector.mask();
        assert!(
            vectors.wait_for_signal(0, Span::default()).unwrap(),
            "what was signalled stays so"
        );
    }

    #[test]
    fn wait_for_a_silent_vector_times_out() {
        let vectors = EventFdVectors::new(1).unwrap();
        assert!(!vectors.wait_for_signal(0, Span::from_ms(1)).unwrap());
    }

    #[test]
    fn signal_from_another_thread_ends_a_wait() {
        let vectors = EventFdVectors::new(1).unwrap();
        let mut theirs = vectors.clone();
        let raiser = std::thread::spawn(move || theirs.raise(0));
        assert!(vectors.wait_for_signal(0, Span::from_secs(10)).unwrap());
        raiser.join().unwrap();
    }

    #[test]
    fn remote_eventfd_must_be_an_eventfd() {
        let (waiting, line) = RemoteEventFd::pair().unwrap();
        let sent = RemoteEventFd::new(waiting.try_clone().unwrap()).unwrap();
        line.signal();
        sent.signal();
        let mut count = [0; 8];
        assert_eq!(rustix::io::read(&waiting, &mut count), Ok(8));
        assert_eq!(u64::from_ne_bytes(count), 2);
        let (pipe, _other) = std::io::pipe().unwrap();
        let refused = RemoteEventFd::new(pipe.into()).unwrap_err().to_string();
        assert!(refused.contains("pipe:") && refused.contains("expected"), "{refused}");
    }

    #[test]
    fn signal_of_a_nonexistent_vector_is_ignored() {
        let mut vectors = EventFdVectors::new(1).unwrap();
        assert!(!vectors.unmask(1));
        vectors.raise(1);
        assert!(!vectors.clear_signals(1) && !vectors.clear_signals(0));
        assert!(
            vectors.wait_for_signal(1, Span::default()).is_err() && vectors.vector(1).is_none()
        );
        assert_eq!(vectors.vector_count(), 1);
    }
}
