//! Queues by handle, each owned by one thread. A call of the owner finds its queue without a lock.
//!
//! ```text
//!   handle   | generation : 32 | place + 1 : 32 |
//!
//!   place    generation   owner                                   queue
//!            of the       FREE: none, may be attached             accessed by the thread that has
//!            open queue   IN_CALL: a call of the owner runs       changed `owner` to IN_CALL
//!                         else: identity of the owning thread
//! ```

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::failure::{Failure, TENMIL_ERROR_HANDLE, TENMIL_ERROR_THREAD};
use crate::queue::Queue;

/// Queue of I/Os of one device. A number: copies refer to the same queue.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueHandle {
    /// Zero is no queue.
    pub id: u64,
}

/// Place of a queue.
struct QueuePlace {
    generation: AtomicU32,
    owner: AtomicUsize,
    queue: UnsafeCell<Option<Box<Queue>>>,
}

// SAFETY: the cell is accessed only by the thread whose compare-and-exchange, or whose store after it has
// found itself as the owner, has set `owner` to IN_CALL; that thread sets another value afterwards, with
// release order, and the next owner acquires it. A queue may move between threads: it is `Send`.
unsafe impl Sync for QueuePlace {}

const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<Queue>();
};

/// Maximum number of open queues of a process.
const QUEUES_MAX: usize = 1024;

/// No thread owns the queue.
const FREE: usize = 0;
/// A call of the owner runs. No thread has this identity, because the address of its variable is aligned.
const IN_CALL: usize = 1;

static PLACES: [QueuePlace; QUEUES_MAX] = [const {
    QueuePlace {
        generation: AtomicU32::new(1),
        owner: AtomicUsize::new(FREE),
        queue: UnsafeCell::new(None),
    }
}; QUEUES_MAX];

/// Places that were freed, and the number of places that were ever used.
static UNUSED: Mutex<(Vec<usize>, usize)> = Mutex::new((Vec::new(), 0));

thread_local! {
    static IDENTITY: u64 = const { 0 };
}

/// Identity of this thread: the address of a variable of it, which no other thread has as long as this one
/// runs.
#[inline]
fn thread_identity() -> usize {
    IDENTITY.with(|variable| std::ptr::from_ref(variable).addr())
}

/// Exclusive use of a place during a call. Ends with the queue owned by `owner`. If the call panics, the
/// place stays in the state `IN_CALL`: nothing uses the queue again.
struct Claim {
    place: &'static QueuePlace,
}

impl Claim {
    fn queue(&mut self) -> &mut Option<Box<Queue>> {
        // SAFETY: this claim is the only one of the place, as argued at `QueuePlace`, and is borrowed.
        unsafe { &mut *self.place.queue.get() }
    }

    #[inline]
    fn end(self, owner: usize) {
        // Pairs with the acquire loads of `claim` and `attach`.
        self.place.owner.store(owner, Ordering::Release);
    }
}

impl QueueHandle {
    /// Adds a queue that the calling thread owns.
    pub(crate) fn add(queue: Queue) -> Result<Self, Failure> {
        let mut unused = UNUSED.lock().unwrap_or_else(PoisonError::into_inner);
        let index = match unused.0.pop() {
            Some(index) => index,
            None if unused.1 < QUEUES_MAX => {
                unused.1 += 1;
                unused.1 - 1
            }
            None => {
                return Err(Failure::usage(format_args!(
                    "create a queue: {QUEUES_MAX} are open in this process, expected fewer"
                )));
            }
        };
        drop(unused);
        let place = &PLACES[index];
        place.owner.store(IN_CALL, Ordering::Relaxed);
        let mut claim = Claim { place };
        *claim.queue() = Some(Box::new(queue));
        let generation = place.generation.load(Ordering::Relaxed);
        claim.end(thread_identity());
        Ok(Self { id: u64::from(generation) << 32 | (index as u64 + 1) })
    }

    /// The place of an open queue.
    #[inline]
    fn place(self) -> Result<&'static QueuePlace, Failure> {
        let index = (self.id & u64::from(u32::MAX)).wrapping_sub(1);
        let place = usize::try_from(index).ok().and_then(|index| PLACES.get(index));
        match place {
            Some(place) if u64::from(place.generation.load(Ordering::Acquire)) == self.id >> 32 => {
                Ok(place)
            }
            _ => Err(self.unknown()),
        }
    }

    #[cold]
    fn unknown(self) -> Failure {
        Failure::new(
            TENMIL_ERROR_HANDLE,
            format_args!("queue {:#x}: there is no such queue, or it has been destroyed", self.id),
        )
    }

    /// Claims the queue for a call of its owner.
    #[inline]
    fn claim(self, identity: usize) -> Result<Claim, Failure> {
        let place = self.place()?;
        let owner = place.owner.load(Ordering::Acquire);
        if owner != identity {
            return Err(self.not_owned(owner));
        }
        // No other thread changes a word that holds the identity of this one.
        place.owner.store(IN_CALL, Ordering::Relaxed);
        Ok(Claim { place })
    }

    #[cold]
    fn not_owned(self, owner: usize) -> Failure {
        let found = match owner {
            FREE => "it is detached, expected a call of tenmil_queue_attach() first",
            IN_CALL => {
                "another call of it runs, or has panicked, expected one call at a time by the thread \
                 that owns it"
            }
            _ => "another thread owns it, expected a call by that thread",
        };
        Failure::new(TENMIL_ERROR_THREAD, format_args!("queue {:#x}: {found}", self.id))
    }

    /// Runs `work` with the queue, which the calling thread owns.
    #[inline]
    pub(crate) fn with<T>(
        self,
        work: impl FnOnce(&mut Queue) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let identity = thread_identity();
        let mut claim = self.claim(identity)?;
        let result = match claim.queue() {
            Some(queue) => work(queue),
            None => Err(self.unknown()),
        };
        claim.end(identity);
        result
    }

    /// Ends the ownership of the calling thread.
    pub(crate) fn detach(self) -> Result<(), Failure> {
        self.claim(thread_identity())?.end(FREE);
        Ok(())
    }

    /// Makes the calling thread the owner of a detached queue.
    pub(crate) fn attach(self) -> Result<(), Failure> {
        let (place, identity) = (self.place()?, thread_identity());
        let exchanged =
            place.owner.compare_exchange(FREE, IN_CALL, Ordering::Acquire, Ordering::Relaxed);
        if let Err(owner) = exchanged {
            return if owner == identity { Ok(()) } else { Err(self.not_owned(owner)) };
        }
        let mut claim = Claim { place };
        // It may have been destroyed, and its place used again and detached, since its generation was read.
        let is_same = u64::from(place.generation.load(Ordering::Relaxed)) == self.id >> 32;
        let is_open = is_same && claim.queue().is_some();
        claim.end(if is_open { identity } else { FREE });
        if is_open { Ok(()) } else { Err(self.unknown()) }
    }

    /// Removes the queue, which the calling thread owns.
    pub(crate) fn remove(self) -> Result<Box<Queue>, Failure> {
        let mut claim = self.claim(thread_identity())?;
        let Some(removed) = claim.queue().take() else { return Err(self.unknown()) };
        // The number of this queue is invalid before its place is free. A place whose generations are used
        // up is not used again.
        let generation = claim.place.generation.load(Ordering::Relaxed);
        claim.place.generation.store(generation.wrapping_add(1), Ordering::Release);
        claim.end(FREE);
        if generation < u32::MAX {
            let index = (self.id & u64::from(u32::MAX)) - 1;
            let mut unused = UNUSED.lock().unwrap_or_else(PoisonError::into_inner);
            unused.0.extend(usize::try_from(index).ok());
        }
        Ok(removed)
    }
}
