//! Checks that every store must pass: in memory, and over a network.

use tenmil_base::Span;

use super::store::{Condition, Put, Snapshot, Store, StoreOperation, StoreReply, Transaction};

/// Checks a store whose group has no keys. `wait` lets this much time of the store pass.
///
/// # Errors
///
/// What was found and what was expected.
pub fn check_store(
    store: &mut dyn Store,
    wait: &mut dyn FnMut(Span),
    lease_time: Span,
) -> Result<(), String> {
    let read = |store: &mut dyn Store| match store.execute(&StoreOperation::Read) {
        StoreReply::Snapshot(snapshot) => Ok(snapshot),
        other => Err(format!("read: {other:?}, expected a snapshot")),
    };
    let put = |key: &str, value: &str, lease| Put { key: key.into(), value: value.into(), lease };
    let condition = |key: &str, revision| Condition { key: key.into(), revision };
    let commit = |store: &mut dyn Store, conditions, puts| {
        store.execute(&StoreOperation::Commit(Transaction { conditions, puts }))
    };
    expect("first read", &read(store)?, &Snapshot::default())?;
    let made = commit(store, vec![condition("a", 0)], vec![put("a", "1", None)]);
    expect("create a key", &made, &StoreReply::Committed)?;
    let again = commit(store, vec![condition("a", 0)], vec![put("a", "2", None)]);
    expect("create a key that exists", &again, &StoreReply::Conflict)?;
    let first = read(store)?;
    expect("value", &first.entries.get("a").map(|entry| entry.value.as_str()), &Some("1"))?;
    let revision = first.revision_of("a");
    let changed =
        commit(store, vec![condition("a", revision)], vec![put("a", "3 \"\n\u{e9}", None)]);
    expect("change a key at its revision", &changed, &StoreReply::Committed)?;
    let stale =
        commit(store, vec![condition("b", 0), condition("a", revision)], vec![put("b", "1", None)]);
    expect("a transaction with one condition that fails", &stale, &StoreReply::Conflict)?;
    let second = read(store)?;
    expect("keys after it", &second.entries.len(), &1)?;
    let value = second.entries.get("a").map(|entry| entry.value.as_str());
    expect("changed value", &value, &Some("3 \"\n\u{e9}"))?;
    if second.revision_of("a") <= revision {
        return Err(format!("revision {}, expected more than {revision}", second.revision_of("a")));
    }
    check_leases(store, wait, lease_time)
}

fn check_leases(
    store: &mut dyn Store,
    wait: &mut dyn FnMut(Span),
    lease_time: Span,
) -> Result<(), String> {
    let grant = |store: &mut dyn Store| match store
        .execute(&StoreOperation::Grant { time_to_live: lease_time })
    {
        StoreReply::Granted(lease) => Ok(lease),
        other => Err(format!("grant: {other:?}, expected a lease")),
    };
    let has = |store: &mut dyn Store, key: &str| match store.execute(&StoreOperation::Read) {
        StoreReply::Snapshot(snapshot) => Ok(snapshot.entries.contains_key(key)),
        other => Err(format!("read: {other:?}, expected a snapshot")),
    };
    let hold = |key: &str, lease| {
        let put = Put { key: key.into(), value: String::new(), lease: Some(lease) };
        StoreOperation::Commit(Transaction { conditions: Vec::new(), puts: vec![put] })
    };
    let (kept, revoked) = (grant(store)?, grant(store)?);
    expect("hold", &store.execute(&hold("kept", kept)), &StoreReply::Committed)?;
    expect("hold", &store.execute(&hold("revoked", revoked)), &StoreReply::Committed)?;
    expect("revoke", &store.execute(&StoreOperation::Revoke(revoked)), &StoreReply::Done)?;
    expect("key of a revoked lease", &has(store, "revoked")?, &false)?;
    let ended = store.execute(&StoreOperation::Renew(revoked));
    expect("renew a revoked lease", &ended, &StoreReply::LeaseEnded)?;
    expect(
        "hold by a revoked lease",
        &store.execute(&hold("x", revoked)),
        &StoreReply::LeaseEnded,
    )?;
    for _ in 0..4 {
        wait(Span { ns: lease_time.ns / 2 });
        expect("renew", &store.execute(&StoreOperation::Renew(kept)), &StoreReply::Done)?;
    }
    expect("key of a renewed lease", &has(store, "kept")?, &true)?;
    // A store may check its leases rarely.
    wait(Span { ns: lease_time.ns * 2 + 1_000_000_000 });
    expect("key of a lease that has ended", &has(store, "kept")?, &false)?;
    let ended = store.execute(&StoreOperation::Renew(kept));
    expect("renew a lease that has ended", &ended, &StoreReply::LeaseEnded)
}

fn expect<T: PartialEq + std::fmt::Debug>(
    what: &str,
    found: &T,
    expected: &T,
) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    Err(format!("{what}: {found:?}, expected {expected:?}"))
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;

    use tenmil_base::{Instant, Span};

    use super::check_store;
    use crate::MemoryStore;
    use crate::store::{Store, StoreOperation, StoreReply};

    struct TimedStore(Rc<Cell<Instant>>, RefCell<MemoryStore>);

    impl Store for TimedStore {
        fn execute(&mut self, operation: &StoreOperation) -> StoreReply {
            self.1.borrow_mut().execute_at(self.0.get(), operation)
        }
    }

    #[test]
    fn store_in_memory_passes() {
        let now = Rc::new(Cell::new(Instant { ns: 1 }));
        let mut store = TimedStore(Rc::clone(&now), RefCell::default());
        let mut wait = |time: Span| now.set(now.get().after(time));
        check_store(&mut store, &mut wait, Span::from_secs(2)).unwrap();
    }
}
