//! The flag of each thread for the biased locks: see `biased_lock.rs`.

use std::sync::{Mutex, PoisonError};

use crate::biased_lock::ThreadFlag;

/// Flags of threads that have ended.
static UNUSED: Mutex<Vec<&'static ThreadFlag>> = Mutex::new(Vec::new());

thread_local! {
    static OWN: OwnFlag = OwnFlag::take();
}

/// The flag of a running thread, which another thread uses after its end.
struct OwnFlag(&'static ThreadFlag);

/// The flag of the calling thread.
#[inline]
pub(crate) fn thread_flag() -> &'static ThreadFlag {
    // Destructors of thread-local values may run after that of the flag.
    OWN.try_with(|own| own.0).unwrap_or_else(|_| ThreadFlag::leaked())
}

impl OwnFlag {
    fn take() -> Self {
        let unused = UNUSED.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Self(unused.unwrap_or_else(ThreadFlag::leaked))
    }
}

impl Drop for OwnFlag {
    fn drop(&mut self) {
        // The mutex orders the accesses of this thread before those of the next with its flag.
        UNUSED.lock().unwrap_or_else(PoisonError::into_inner).push(self.0);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::thread_flag;
    use crate::asymmetric_barrier::AsymmetricBarrier;
    use crate::biased_lock::BiasedLock;
    use crate::named_thread::{NamedThread, yield_cpu};

    #[test]
    fn threads_that_run_at_once_have_different_flags() {
        let own = thread_flag();
        assert!(std::ptr::eq(own, thread_flag()));
        let other =
            NamedThread::spawn("other", None, |_: &_| std::ptr::from_ref(thread_flag()) as usize);
        assert_ne!(other.unwrap().join(), std::ptr::from_ref(own) as usize);
    }

    #[test]
    fn threads_access_a_value_one_at_a_time() {
        const ROUNDS: u64 = 20_000;
        for barrier in [AsymmetricBarrier::detect(), AsymmetricBarrier::FullFences] {
            // Two numbers that differ while a thread changes them, which no lock-free access would
            // keep equal.
            let lock = Arc::new(BiasedLock::new([0_u64; 2], barrier));
            let is_over = Arc::new(AtomicBool::new(false));
            let add = |rounds: u64, lock: &BiasedLock<[u64; 2]>| {
                for round in 0..rounds {
                    lock.access(thread_flag(), |value| {
                        assert_eq!(value[0], value[1]);
                        value[0] += 1;
                        std::hint::black_box(&mut *value);
                        value[1] += 1;
                    });
                    if round % 64 == 0 {
                        yield_cpu();
                    }
                }
            };
            let (theirs, ended) = (Arc::clone(&lock), Arc::clone(&is_over));
            let other = NamedThread::spawn("other", None, move |_: &_| {
                add(ROUNDS, &theirs);
                ended.store(true, Ordering::Relaxed);
            })
            .unwrap();
            let mut own = 0;
            while !is_over.load(Ordering::Relaxed) {
                add(1, &lock);
                own += 1;
            }
            other.join();
            assert_eq!(lock.access(thread_flag(), |value| *value), [ROUNDS + own; 2]);
        }
    }

    #[test]
    fn panic_releases_the_value() {
        let lock = Arc::new(BiasedLock::new(1, AsymmetricBarrier::detect()));
        let body = std::panic::AssertUnwindSafe(|| {
            lock.access(thread_flag(), |_| panic!("inside"));
        });
        assert!(std::panic::catch_unwind(body).is_err());
        let theirs = Arc::clone(&lock);
        let other = NamedThread::spawn("other", None, move |_: &_| {
            theirs.access(thread_flag(), |value| *value)
        });
        assert_eq!(other.unwrap().join(), 1);
    }
}
