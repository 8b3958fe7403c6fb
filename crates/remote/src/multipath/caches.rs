//! Which controllers may still have answered writes in volatile caches of their own.
//!
//! ```text
//!   epoch of a path    1 · · · · · 2 · · · · · 3 · ·     each flush that is sent begins the next
//!   writes answered      1   1         2   2             noted once in an epoch
//!   flush answered               1 ┘ · · · ·             all writes up to its epoch are durable
//! ```
//!
//! A flush covers what its own controller has completed before it came (Base 2.1 §7.2), and writes go
//! by many paths: so a flush goes to each controller that has answered writes since its last one. What
//! becomes of the writes of a controller that is lost is told by [`Cache`].

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Whose the volatile cache is that answered writes may lie in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// All controllers of the subsystem write through one: what one of them has answered, a flush that
    /// another one answers makes durable.
    #[default]
    Shared,
    /// Each controller has its own: writes that were answered by one that was lost before a flush may
    /// be lost with it, and flushes say so.
    Separate,
}

/// What is known of all paths.
pub(super) struct Caches {
    /// By path: the number of the controller whose writes of this epoch have been noted; zero if none.
    noted: Box<[AtomicU32]>,
    known: Mutex<Known>,
}

struct Known {
    paths: Box<[PathCache]>,
    losses: u64,
}

/// Of one path.
#[derive(Clone, Copy)]
struct PathCache {
    /// The number of its controller: another one after each loss.
    controller: u32,
    epoch: u64,
    /// The last epoch in which a write was answered; zero if none was.
    wrote: u64,
    /// The last epoch whose writes are durable.
    flushed: u64,
}

/// What a flush has to know before it begins, or goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owing {
    /// Paths, by bits, whose controllers may have writes in their caches.
    pub(super) paths: u32,
    /// How often a controller was lost that had some.
    pub(super) losses: u64,
}

impl Cache {
    /// The words by which they are known.
    pub const NAMES: [(&'static str, Self); 2] =
        [("shared", Self::Shared), ("separate", Self::Separate)];
}

impl Caches {
    pub(super) fn new(count: usize) -> Self {
        let path = PathCache { controller: 1, epoch: 1, wrote: 0, flushed: 0 };
        let known = Known { paths: vec![path; count].into(), losses: 0 };
        Self { noted: (0..count).map(|_| AtomicU32::new(0)).collect(), known: Mutex::new(known) }
    }

    /// The number of the controller that `path` leads to from now on.
    pub(super) fn controller(&self, path: usize) -> u32 {
        self.lock().paths[path].controller
    }

    /// `controller` has answered a write, and whoever asked for it has not been told yet. Returns
    /// which controller the path leads to now.
    #[inline]
    pub(super) fn wrote(&self, path: usize, controller: u32) -> u32 {
        // A flush that begins at this moment is sent after this look, and so covers the write.
        if self.noted[path].load(Ordering::Acquire) == controller {
            return controller;
        }
        self.note(path, controller)
    }

    #[cold]
    fn note(&self, path: usize, controller: u32) -> u32 {
        let mut known = self.lock();
        let Known { paths, losses } = &mut *known;
        let cache = &mut paths[path];
        // Lost meanwhile, and its write came too late to be counted then.
        *losses += u64::from(cache.controller != controller);
        cache.wrote = cache.epoch;
        self.noted[path].store(cache.controller, Ordering::Release);
        cache.controller
    }

    /// What there is to flush.
    pub(super) fn owing(&self) -> Owing {
        let known = self.lock();
        let is_owing = |cache: &PathCache| cache.wrote > cache.flushed;
        let bits = known.paths.iter().enumerate().filter(|(_, cache)| is_owing(cache));
        Owing { paths: bits.fold(0, |bits, (path, _)| bits | 1 << path), losses: known.losses }
    }

    /// A flush is about to be sent to `path`: what [`flushed`](Self::flushed) is told of when it has
    /// been answered.
    pub(super) fn flushing(&self, path: usize) -> u64 {
        let mut known = self.lock();
        let cache = &mut known.paths[path];
        cache.epoch += 1;
        self.noted[path].store(0, Ordering::Release);
        cache.epoch - 1
    }

    /// The flush of `epoch` has been answered by `path`.
    pub(super) fn flushed(&self, path: usize, epoch: u64) {
        let cache = &mut self.lock().paths[path];
        cache.flushed = cache.flushed.max(epoch);
    }

    /// The controller that `path` led to is gone.
    pub(super) fn lose(&self, path: usize) {
        let mut known = self.lock();
        let Known { paths, losses } = &mut *known;
        let cache = &mut paths[path];
        *losses += u64::from(cache.wrote > cache.flushed);
        // Epochs go on: a flush of the old controller is none of the new one.
        cache.flushed = cache.epoch;
        cache.epoch += 1;
        cache.controller = cache.controller.wrapping_add(1).max(1);
        self.noted[path].store(0, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::{Caches, Owing};

    fn owing(caches: &Caches) -> (u32, u64) {
        let Owing { paths, losses } = caches.owing();
        (paths, losses)
    }

    #[test]
    fn a_path_owes_a_flush_from_its_first_write_until_a_later_flush_is_answered() {
        let caches = Caches::new(2);
        assert_eq!(owing(&caches), (0, 0));
        caches.wrote(1, 1);
        assert_eq!(owing(&caches), (0b10, 0));
        let first = caches.flushing(1);
        assert_eq!(owing(&caches), (0b10, 0), "not before it is answered");
        caches.wrote(1, 1);
        caches.flushed(1, first);
        assert_eq!(owing(&caches), (0b10, 0), "the second write came after it");
        let (second, third) = (caches.flushing(1), caches.flushing(1));
        caches.flushed(1, third);
        caches.flushed(1, second);
        assert_eq!(owing(&caches), (0, 0));
    }

    #[test]
    fn what_a_lost_controller_owes_is_counted_and_owed_by_no_other() {
        let caches = Caches::new(1);
        caches.lose(0);
        assert_eq!(owing(&caches), (0, 0), "it owed nothing");
        let second = caches.controller(0);
        caches.wrote(0, second);
        let epoch = caches.flushing(0);
        caches.lose(0);
        assert_eq!(owing(&caches), (0, 1));
        let third = caches.controller(0);
        assert_ne!(second, third);
        caches.wrote(0, third);
        caches.flushed(0, epoch);
        assert_eq!(owing(&caches), (1, 1), "the answer is the old one's");
        caches.flushed(0, caches.flushing(0));
        // An answer of the old one that was read late.
        assert_eq!(caches.wrote(0, second), third);
        assert_eq!(owing(&caches), (1, 2));
    }
}
