//! Handles: numbers that refer to objects of the library. A number is never used twice, so a handle of a
//! closed object is detected.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::failure::{Failure, TENMIL_ERROR_HANDLE};

/// Open objects of one kind, by handle.
pub(crate) struct HandleTable<T> {
    /// Kind of the objects, for errors.
    kind: &'static str,
    entries: Mutex<BTreeMap<u64, Arc<T>>>,
}

/// The next handle, of any kind: a handle of one kind is not one of another.
static NEXT: AtomicU64 = AtomicU64::new(1);

impl<T> HandleTable<T> {
    pub(crate) const fn new(kind: &'static str) -> Self {
        Self { kind, entries: Mutex::new(BTreeMap::new()) }
    }

    /// Adds an object and returns its handle.
    pub(crate) fn add(&self, object: Arc<T>) -> u64 {
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        self.lock().insert(id, object);
        id
    }

    /// The object of a handle.
    pub(crate) fn get(&self, id: u64) -> Result<Arc<T>, Failure> {
        self.lock().get(&id).cloned().ok_or_else(|| self.unknown(id))
    }

    /// Removes an object that nothing else refers to. `users` names what may refer to it.
    pub(crate) fn remove_unused(&self, id: u64, users: &str) -> Result<Arc<T>, Failure> {
        let mut entries = self.lock();
        let object = entries.get(&id).ok_or_else(|| self.unknown(id))?;
        // Other references are made under the lock, or from an object that has one.
        let others = Arc::strong_count(object) - 1;
        if others > 0 {
            let kind = self.kind;
            return Err(Failure::busy(format_args!(
                "close the {kind}: {others} {users} or calls use it, expected none"
            )));
        }
        entries.remove(&id).ok_or_else(|| self.unknown(id))
    }

    fn unknown(&self, id: u64) -> Failure {
        let kind = self.kind;
        Failure::new(
            TENMIL_ERROR_HANDLE,
            format_args!("{kind} {id}: there is no such {kind}, or it has been closed"),
        )
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<T>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::HandleTable;

    #[test]
    fn handle_of_a_closed_object_stays_invalid() {
        let table = HandleTable::new("thing");
        let first = table.add(Arc::new(1));
        assert_eq!(table.get(first).map(|value| *value).ok(), Some(1));
        let in_use = table.get(first).unwrap();
        assert!(table.remove_unused(first, "others").is_err(), "it is in use");
        drop(in_use);
        assert!(table.remove_unused(first, "others").is_ok());
        let second = table.add(Arc::new(2));
        assert_ne!(first, second);
        assert!(table.get(first).is_err() && table.remove_unused(first, "others").is_err());
        assert!(table.get(0).is_err());
    }
}
