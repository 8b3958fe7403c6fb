//! Model check of a shared context, with every ordering that the memory model permits.
//!
//! The files are those of the product; only the types of `sync` are the checker's. A member that sleeps
//! forever is a deadlock, which the checker reports.

#![allow(clippy::duplicate_mod, reason = "that is the point of it")]

#[path = "inbox.rs"]
mod inbox;
#[path = "shared_context.rs"]
#[allow(dead_code, unreachable_pub, reason = "the models need a part of it")]
mod shared_context;

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use loom::thread;
use tenmil_base::{
    ChannelWakeup, CompletionBatch, Durability, Instant, IoChannel, IoCompletion, IoStatus, Limits,
    Operation, OperationSet, Request, Segment,
};

use self::shared_context::{ContextMember, SharedContext};
use self::sync::{ChannelShared, Clock, EventFdVectors, FENCES};
use super::wait_queue;
use crate::bdev::ChannelMode;

/// The types of `context::sync` from the model checker.
mod sync {
    use std::cell::{Cell, RefCell};
    use std::io;
    use std::os::fd::BorrowedFd;

    use std::ops::{Deref, DerefMut};
    // Not the checker's type: reference counts are not part of the model.
    pub(crate) use std::sync::Arc;
    use std::sync::{LockResult, TryLockError, TryLockResult};

    use loom::sync::Condvar;
    use loom::sync::atomic::{AtomicBool, fence};
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    pub(crate) use loom::thread::yield_now as yield_cpu;
    use tenmil_base::{Instant, Interrupts, Span};

    /// A lock based on one atomic. The checker's own lock does not explore a failing `try_lock`, and
    /// orders more than a lock does.
    #[derive(Debug)]
    pub(crate) struct Mutex<T> {
        held: AtomicBool,
        inner: std::sync::Mutex<T>,
    }

    #[derive(Debug)]
    pub(crate) struct MutexGuard<'a, T> {
        held: &'a AtomicBool,
        inner: Option<std::sync::MutexGuard<'a, T>>,
    }

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self { held: AtomicBool::new(false), inner: std::sync::Mutex::new(value) }
        }

        pub(crate) fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
            let taken =
                self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
            match taken {
                Ok(_) => {
                    Ok(MutexGuard { held: &self.held, inner: Some(self.inner.lock().unwrap()) })
                }
                Err(_) => Err(TryLockError::WouldBlock),
            }
        }

        pub(crate) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
            loop {
                match self.try_lock() {
                    Ok(guard) => return Ok(guard),
                    Err(_) => yield_cpu(),
                }
            }
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.inner.as_ref().unwrap()
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.inner.as_mut().unwrap()
        }
    }

    impl<T> Drop for MutexGuard<'_, T> {
        fn drop(&mut self) {
            self.inner = None;
            // The checker must not be called after it has found an error.
            if !std::thread::panicking() {
                self.held.store(false, Ordering::Release);
            }
        }
    }

    std::thread_local! {
        /// Whether wakers have their barrier. A test without it must fail.
        pub(crate) static FENCES: Cell<bool> = const { Cell::new(true) };
        /// The vector created last, for the thread that waits for it.
        static MADE: RefCell<Option<EventFdVectors>> = const { RefCell::new(None) };
    }

    /// An interrupt vector as in `host`: a flag, a barrier of two halves, and an event descriptor.
    #[derive(Clone, Debug)]
    pub(crate) struct EventFdVectors(Arc<Vector>);

    #[derive(Debug)]
    struct Vector {
        asleep: AtomicBool,
        given: loom::sync::Mutex<bool>,
        changed: Condvar,
    }

    impl EventFdVectors {
        pub(crate) fn new(_: u16) -> io::Result<Self> {
            let (given, changed) = (loom::sync::Mutex::new(false), Condvar::new());
            let asleep = AtomicBool::new(true);
            let made = Self(Arc::new(Vector { asleep, given, changed }));
            MADE.set(Some(made.clone()));
            Ok(made)
        }

        pub(crate) fn take_made() -> Self {
            MADE.take().unwrap()
        }

        pub(crate) fn unmask(&self, _: u16) -> bool {
            *self.0.given.lock().unwrap() = false;
            self.0.asleep.store(true, Ordering::Relaxed);
            fence_if_enabled();
            true
        }

        pub(crate) fn mask(&self, _: u16) {
            self.0.asleep.store(false, Ordering::Relaxed);
        }

        pub(crate) fn descriptor(&self, _: u16) -> Option<BorrowedFd<'_>> {
            None
        }

        pub(crate) fn wait(&self) {
            let mut given = self.0.given.lock().unwrap();
            while !*given {
                given = self.0.changed.wait(given).unwrap();
            }
        }
    }

    impl Interrupts for EventFdVectors {
        fn raise(&mut self, _: u16) {
            fence_if_enabled();
            if self.0.asleep.load(Ordering::Relaxed) && self.0.asleep.swap(false, Ordering::AcqRel)
            {
                *self.0.given.lock().unwrap() = true;
                self.0.changed.notify_one();
            }
        }
    }

    fn fence_if_enabled() {
        if FENCES.get() {
            fence(Ordering::SeqCst);
        }
    }

    /// Time stands still, so no reservation expires.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct Clock;

    impl Clock {
        pub(crate) fn now(self) -> Instant {
            Instant::default()
        }

        pub(crate) fn raw_ticks(self) -> u64 {
            0
        }
    }

    /// The part of a port that a context uses.
    #[derive(Debug, Default)]
    pub(crate) struct ChannelShared {
        pub(crate) meter: ModelMeter,
    }

    #[derive(Debug, Default)]
    pub(crate) struct ModelMeter;

    impl ModelMeter {
        pub(crate) fn add_lock_wait(&self, ticks: u64) -> Span {
            Span { ns: ticks }
        }
    }
}

/// A device that completes requests at the next poll, without a wake source: arming it reports pending
/// completions.
struct ImmediateChannel {
    limits: Limits,
    completions: VecDeque<IoCompletion>,
}

impl ImmediateChannel {
    fn with_depth(depth_max: u32) -> Box<dyn IoChannel> {
        let limits = Limits {
            block_size: 512,
            metadata_size: 0,
            block_count: 8,
            request_blocks_max: 1,
            segments_max: 1,
            optimal_boundary_blocks: 0,
            atomic_write_blocks: 1,
            depth_max,
            durability: Durability::NonPersistent,
            operations: OperationSet::from_operations(&[Operation::Flush]),
        };
        Box::new(Self { limits, completions: VecDeque::new() })
    }
}

impl IoChannel for ImmediateChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _: Instant, requests: &[Request], _: &[Segment]) -> usize {
        let room = self.limits.depth_max as usize - self.completions.len();
        let count = room.min(requests.len());
        let completion = |request: &Request| IoCompletion {
            token: request.token,
            status: IoStatus::SUCCESS,
            result: u32::try_from(request.lba).unwrap(),
        };
        self.completions.extend(requests[..count].iter().map(completion));
        count
    }

    fn poll(&mut self, _: Instant, completions: &mut CompletionBatch) -> usize {
        let count = completions.remaining().min(self.completions.len());
        self.completions.drain(..count).for_each(|completion| completions.push(completion));
        count
    }
}

impl ChannelWakeup for ImmediateChannel {
    fn arm(&mut self) -> bool {
        !self.completions.is_empty()
    }
}

const NOW: Instant = Instant { ns: 1 };

/// A thread: submits `count` requests with tag 0 one after another, and sleeps in between. After an
/// error, the member is not dropped, because that would call the checker.
fn run_member(member: ContextMember, waker: &EventFdVectors, of: u64, count: u64) {
    let mut member = ManuallyDrop::new(member);
    let mut completions = CompletionBatch::with_capacity(1);
    for number in 0..count {
        let mut sent = false;
        loop {
            if !sent {
                let mut request = [Request { lba: of + number, ..Request::PLACEHOLDER }];
                sent = member.submit(NOW, &mut request, &[]) == 1;
            }
            if member.poll(NOW, &mut completions) > 0 {
                break;
            }
            if member.arm() {
                thread::yield_now();
            } else {
                waker.wait();
            }
            member.disarm();
        }
        let own = IoCompletion {
            token: 0,
            status: IoStatus::SUCCESS,
            result: result_of_lba(of + number),
        };
        assert_eq!(completions.drain().collect::<Vec<_>>(), [own]);
    }
    drop(ManuallyDrop::into_inner(member));
}

fn result_of_lba(lba: u64) -> u32 {
    u32::try_from(lba).unwrap()
}

/// Two members of one context over a device of this depth, each on its thread.
fn run_context_with_two_members(depth: u32, count: u64) {
    let context = Arc::new(SharedContext::new(ChannelMode::Mq, Clock));
    let join = || {
        let open = || Ok(ImmediateChannel::with_depth(depth));
        let port = Arc::new(ChannelShared::default());
        let member = SharedContext::add_member(Arc::clone(&context), &port, 2, open).unwrap();
        (member, EventFdVectors::take_made())
    };
    let ((one, mine), (two, theirs)) = (join(), join());
    let other = thread::spawn(move || run_member(two, &theirs, 100, count));
    run_member(one, &mine, 200, count);
    other.join().unwrap();
}

fn check_interleavings(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

#[test]
fn members_receive_completions_polled_by_the_other_and_miss_no_wakeup() {
    check_interleavings(|| run_context_with_two_members(2, 2));
}

#[test]
fn member_waiting_for_the_single_entry_is_woken() {
    check_interleavings(|| run_context_with_two_members(1, 1));
}

#[test]
#[should_panic(expected = "deadlock")]
fn missing_barrier_is_detected_as_a_lost_wakeup() {
    FENCES.set(false);
    check_interleavings(|| run_context_with_two_members(2, 1));
}
