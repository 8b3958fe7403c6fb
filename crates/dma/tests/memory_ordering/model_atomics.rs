//! The checker's types, with one ordering omitted on request.

use loom::sync::atomic;
pub(crate) use std::sync::atomic::Ordering;

use super::LEFT_OUT;

fn is_ordering_omitted(what: &str) -> bool {
    LEFT_OUT.get().is_some_and(|left_out| left_out == what)
}

pub(crate) fn fence(side: &str, order: Ordering) {
    let name = match order {
        Ordering::Acquire => "acquire fence",
        Ordering::Release => "release fence",
        _ => "full fence",
    };
    if !is_ordering_omitted(&format!("{side}: {name}")) {
        atomic::fence(order);
    }
}

fn store_ordering(order: Ordering) -> Ordering {
    if is_ordering_omitted("release") { Ordering::Relaxed } else { order }
}

fn load_ordering(order: Ordering) -> Ordering {
    if is_ordering_omitted("acquire") { Ordering::Relaxed } else { order }
}

#[derive(Debug)]
pub(crate) struct AtomicU64(atomic::AtomicU64);

#[derive(Debug)]
pub(crate) struct AtomicU32(atomic::AtomicU32);

impl AtomicU64 {
    pub(crate) fn new(value: u64) -> Self {
        Self(atomic::AtomicU64::new(value))
    }

    pub(crate) fn load(&self, order: Ordering) -> u64 {
        self.0.load(load_ordering(order))
    }

    pub(crate) fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, store_ordering(order));
    }
}

impl AtomicU32 {
    pub(crate) fn new(value: u32) -> Self {
        Self(atomic::AtomicU32::new(value))
    }

    pub(crate) fn load(&self, order: Ordering) -> u32 {
        self.0.load(load_ordering(order))
    }

    pub(crate) fn store(&self, value: u32, order: Ordering) {
        self.0.store(value, store_ordering(order));
    }
}
