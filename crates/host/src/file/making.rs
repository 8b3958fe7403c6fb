//! Whether this process makes and grows files, and what it has made until it knows that it may.
//!
//! A command that only reads makes nothing. Of one that writes, what it has made or grown is put back
//! if it is refused: until [`keep`] is called, each file is recorded as it was found.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::before::Before;

/// What becomes of files that are not there, or shorter than asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Making {
    /// They are made and grown.
    Kept,
    /// They are made and grown, and recorded, to be put back by [`put_back`].
    Recorded,
    /// They are refused.
    Refused,
}

static MAKING: AtomicU8 = AtomicU8::new(Making::Kept as u8);
static FOUND: Mutex<Vec<Before>> = Mutex::new(Vec::new());

/// Sets what becomes of files from now on: once, when a process begins. Where nobody does, they are
/// kept.
pub fn set_making(making: Making) {
    MAKING.store(making as u8, Ordering::Relaxed);
}

/// The command only reads: what was to be recorded is refused from now on. Changes nothing where nobody
/// has set [`Making::Recorded`].
pub fn refuse_making() {
    let (recorded, refused) = (Making::Recorded as u8, Making::Refused as u8);
    let _ = MAKING.compare_exchange(recorded, refused, Ordering::Relaxed, Ordering::Relaxed);
}

/// What was made is wanted: a server is ready, a command has done what it was asked.
pub fn keep() {
    found().clear();
    let recorded = Making::Recorded as u8;
    // Refused stays refused.
    let _ =
        MAKING.compare_exchange(recorded, Making::Kept as u8, Ordering::Relaxed, Ordering::Relaxed);
}

/// Takes away what was made, and shortens what was grown, since [`Making::Recorded`] was set. What holds
/// data by now, or is open, stays: so whoever opened it closes it first.
pub fn put_back() {
    // The last first: a file may have been made and then grown.
    let made = std::mem::take(&mut *found());
    made.iter().rev().for_each(Before::put_back);
}

/// What becomes of files now.
pub(super) fn making() -> Making {
    match MAKING.load(Ordering::Relaxed) {
        0 => Making::Kept,
        1 => Making::Recorded,
        _ => Making::Refused,
    }
}

/// Records a file before it is made or grown.
pub(super) fn record(before: Option<Before>) {
    if making() == Making::Recorded
        && let Some(before) = before
    {
        found().push(before);
    }
}

fn found() -> MutexGuard<'static, Vec<Before>> {
    FOUND.lock().unwrap_or_else(PoisonError::into_inner)
}
