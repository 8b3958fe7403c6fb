//! Store of a gateway group in one object of a Ceph pool.
//!
//! ```text
//!   map of the object (omap):  revision    which each transaction compares and increases
//!                              GROUP/KEY   revision, lease and value of a key
//!   lock `GROUP`:              a shared lock with a duration for each lease; its cookie is the number of the lease
//! ```
//!
//! A transaction reads the map, checks its conditions, and writes only if the revision is still the same; if it is not,
//! it begins again. The OSD ends a lock whose duration is over, by its own clock, and renews none that has ended. So a lease
//! that has ended never returns, and the keys of one are deleted by the first client that reads the map after that. Watchers
//! of the object are notified of each change.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::CString;
use std::sync::Arc;

use tenmil_base::{Error, Random, Span};
use tenmil_group::{Entry, LeaseId, Snapshot, Store, StoreOperation, StoreReply, Transaction};

use crate::ceph_error::ceph_error;
use crate::librbd::{CephErrno, Notification, ObjectChange, PoolContext};
use crate::store_cluster::StoreCluster;

/// Store of a group in an object of a pool.
#[derive(Debug)]
pub struct RadosStore {
    cluster: StoreCluster,
    group: GroupKeys,
    random: Random,
    /// Leases that this store has granted, with their time.
    granted: BTreeMap<LeaseId, Span>,
    notifications: VecDeque<Notification>,
}

/// Names of a group in the object.
#[derive(Clone, Debug)]
struct GroupKeys {
    /// Name of the group, which is that of the lock.
    name: CString,
    /// What the keys of the group begin with.
    prefix: String,
}

/// What the store does with its object.
trait MapObject {
    /// Creates the object with its revision.
    fn create(&self) -> Result<(), CephErrno>;
    /// The map with its keys.
    fn read_map(&self) -> Result<BTreeMap<String, String>, CephErrno>;
    /// Changes the map if its revision is still the same.
    fn change_map(&self, change: &ObjectChange) -> Result<(), CephErrno>;
    /// Creates a lock with a duration.
    fn lock(&self, group: &GroupKeys, lease: LeaseId, time: Span) -> Result<(), CephErrno>;
    /// Renews a lock.
    fn renew(&self, group: &GroupKeys, lease: LeaseId, time: Span) -> Result<(), CephErrno>;
    /// Ends a lock.
    fn unlock(&self, group: &GroupKeys, lease: LeaseId) -> Result<(), CephErrno>;
    /// Locks that have not ended.
    fn leases(&self, group: &GroupKeys) -> Result<BTreeSet<LeaseId>, CephErrno>;
}

/// An object of a pool.
pub(crate) struct PoolObject {
    pub(crate) pool: Arc<PoolContext>,
    pub(crate) name: CString,
}

/// The map of a group at one revision.
#[derive(Debug, Default)]
struct GroupMap {
    /// Value of the key of the revision; empty if the object does not exist.
    revision: String,
    keys: BTreeMap<String, KeyValue>,
}

/// Value of a key in the map: `REVISION LEASE`, a line break, and the value.
#[derive(Clone, Debug, PartialEq, Eq)]
struct KeyValue {
    revision: u64,
    lease: Option<LeaseId>,
    value: String,
}

/// What an operation has found, and whether it has changed the map.
type Done = (StoreReply, bool);

/// Key of the revision of the object, and its first value.
const REVISION: &str = "revision";
const FIRST_REVISION: &str = "0";
/// A text that the key of the revision follows, with few others in between.
const BEFORE_REVISION: &str = "revisio";
/// How often a transaction is tried while others change the map.
const ATTEMPTS: usize = 16;
/// How often a map of several pages is read while others change it.
const READ_ATTEMPTS: usize = 16;
/// Time in which clients confirm a notification; one that does not loses nothing but time.
const NOTIFY_LIMIT: Span = Span::from_secs(1);
/// Largest number of notifications under way.
const NOTIFICATIONS_MAX: usize = 16;

impl RadosStore {
    /// A store with the keys of this group. `seed` is different for each.
    #[must_use]
    pub fn new(cluster: &StoreCluster, group: &str, seed: u64) -> Self {
        Self {
            cluster: cluster.clone(),
            group: GroupKeys::new(group),
            random: Random::new(seed),
            granted: BTreeMap::new(),
            notifications: VecDeque::new(),
        }
    }

    fn try_execute(&mut self, operation: &StoreOperation) -> Result<StoreReply, Error> {
        let object = self.cluster.object()?;
        let executed =
            execute(&object, &self.group, &mut self.granted, &mut self.random, operation);
        let (reply, has_changed) = executed.map_err(|errno| {
            self.cluster.handle_error(errno);
            if errno.0 == libc::EEXIST {
                let text = format!(
                    "{}: the object is not the store of a gateway group, expected one, or none of that name",
                    self.cluster
                );
                return Error::usage(text);
            }
            ceph_error(self.cluster.to_string(), errno)
        })?;
        if has_changed {
            self.notify(&object);
        }
        Ok(reply)
    }

    /// Notifies the other members, which read the map every second anyway.
    fn notify(&mut self, object: &PoolObject) {
        while self.notifications.front().is_some_and(Notification::is_complete)
            || self.notifications.len() >= NOTIFICATIONS_MAX
        {
            self.notifications.pop_front();
        }
        self.notifications.extend(object.pool.notify(&object.name, NOTIFY_LIMIT).ok());
    }
}

impl Store for RadosStore {
    fn execute(&mut self, operation: &StoreOperation) -> StoreReply {
        self.try_execute(operation).unwrap_or_else(|error| StoreReply::Unknown(error.text))
    }
}

impl GroupKeys {
    fn new(group: &str) -> Self {
        // A name has no NUL byte: `[group]` permits letters, digits, hyphens, underscores and periods.
        let name = CString::new(group).unwrap_or_default();
        Self { name, prefix: format!("{group}/") }
    }
}

impl PoolObject {
    fn read_revision(&self) -> Result<Option<String>, CephErrno> {
        // The key behind which the revision stands.
        let (entries, _) = self.pool.read_map_page(&self.name, BEFORE_REVISION)?;
        Ok(entries.get(REVISION).cloned())
    }

    /// Leases of a group that have not ended.
    pub(crate) fn leases_of(&self, group: &str) -> Result<BTreeSet<LeaseId>, CephErrno> {
        self.leases(&GroupKeys::new(group))
    }
}

impl MapObject for PoolObject {
    fn create(&self) -> Result<(), CephErrno> {
        self.pool.create_map(&self.name, &[(REVISION.to_owned(), FIRST_REVISION.to_owned())])
    }

    fn read_map(&self) -> Result<BTreeMap<String, String>, CephErrno> {
        for _ in 0..READ_ATTEMPTS {
            let (mut entries, mut has_more) = self.pool.read_map_page(&self.name, "")?;
            let is_one_page = !has_more;
            while has_more {
                let last = entries.last_key_value().map(|(key, _)| key.clone()).unwrap_or_default();
                let (page, more) = self.pool.read_map_page(&self.name, &last)?;
                has_more = more && !page.is_empty();
                entries.extend(page);
            }
            // The pages are of one revision if that is still the same.
            let is_same = is_one_page || {
                // Keys of groups may stand on either side of it.
                self.read_revision()? == entries.get(REVISION).cloned()
            };
            if is_same {
                return Ok(entries);
            }
        }
        Err(CephErrno(libc::EAGAIN))
    }

    fn change_map(&self, change: &ObjectChange) -> Result<(), CephErrno> {
        self.pool.change_map(&self.name, change)
    }

    fn lock(&self, group: &GroupKeys, lease: LeaseId, time: Span) -> Result<(), CephErrno> {
        self.pool.lock_for(&self.name, &group.name, &cookie(lease), time)
    }

    fn renew(&self, group: &GroupKeys, lease: LeaseId, time: Span) -> Result<(), CephErrno> {
        self.pool.renew_lock(&self.name, &group.name, &cookie(lease), time)
    }

    fn unlock(&self, group: &GroupKeys, lease: LeaseId) -> Result<(), CephErrno> {
        self.pool.unlock(&self.name, &group.name, &cookie(lease))
    }

    fn leases(&self, group: &GroupKeys) -> Result<BTreeSet<LeaseId>, CephErrno> {
        let cookies = self.pool.lock_cookies(&self.name, &group.name)?;
        Ok(cookies.iter().filter_map(|text| lease_of_cookie(text)).collect())
    }
}

/// Executes an operation.
fn execute(
    object: &dyn MapObject,
    group: &GroupKeys,
    granted: &mut BTreeMap<LeaseId, Span>,
    random: &mut Random,
    operation: &StoreOperation,
) -> Result<Done, CephErrno> {
    match operation {
        StoreOperation::Grant { time_to_live } => {
            let lease = LeaseId(random.next_u64() | 1);
            // A lock would create the object without a revision.
            create_if_missing(object)?;
            object.lock(group, lease, *time_to_live)?;
            granted.insert(lease, *time_to_live);
            Ok((StoreReply::Granted(lease), false))
        }
        StoreOperation::Renew(lease) => {
            let Some(time) = granted.get(lease) else { return Ok((StoreReply::LeaseEnded, false)) };
            end_if_missing(object.renew(group, *lease, *time), granted, *lease)
        }
        StoreOperation::Revoke(lease) => {
            let (reply, _) = end_if_missing(object.unlock(group, *lease), granted, *lease)?;
            granted.remove(lease);
            // Its keys are deleted here already, so that others need not wait for the next read.
            let (_, has_changed) = read(object, group)?;
            Ok((reply, has_changed))
        }
        StoreOperation::Read => {
            let (map, has_changed) = read(object, group)?;
            Ok((StoreReply::Snapshot(map.snapshot()), has_changed))
        }
        StoreOperation::Commit(transaction) => commit(object, group, transaction),
    }
}

/// Creates the object if it does not exist.
fn create_if_missing(object: &dyn MapObject) -> Result<(), CephErrno> {
    match object.create() {
        Err(CephErrno(libc::EEXIST)) if object.read_map()?.contains_key(REVISION) => Ok(()),
        created => created,
    }
}

/// The reply to the renewal or the end of a lock, which does not exist if it has ended.
fn end_if_missing(
    result: Result<(), CephErrno>,
    granted: &mut BTreeMap<LeaseId, Span>,
    lease: LeaseId,
) -> Result<Done, CephErrno> {
    match result {
        Ok(()) => Ok((StoreReply::Done, false)),
        Err(CephErrno(libc::ENOENT)) => {
            granted.remove(&lease);
            Ok((StoreReply::LeaseEnded, false))
        }
        Err(errno) => Err(errno),
    }
}

/// Reads the map and deletes the keys of leases that have ended. Returns the map, and whether keys were deleted.
fn read(object: &dyn MapObject, group: &GroupKeys) -> Result<(GroupMap, bool), CephErrno> {
    for _ in 0..ATTEMPTS {
        let mut map = GroupMap::decode(group, &object.read_map()?);
        if map.keys.values().all(|key| key.lease.is_none()) {
            return Ok((map, false));
        }
        // Read behind the map: the lease of each of its keys was granted before.
        let leases = object.leases(group)?;
        let has_ended = |key: &KeyValue| key.lease.is_some_and(|lease| !leases.contains(&lease));
        let ended = map.keys.iter().filter(|(_, value)| has_ended(value));
        let ended: Vec<String> = ended.map(|(key, _)| key.clone()).collect();
        if ended.is_empty() {
            return Ok((map, false));
        }
        let change = map.change(group, Vec::new(), &ended);
        match object.change_map(&change) {
            Ok(()) => {
                map.keys.retain(|key, _| !ended.contains(key));
                return Ok((map, true));
            }
            Err(CephErrno(libc::ECANCELED)) => {}
            Err(errno) => return Err(errno),
        }
    }
    Err(CephErrno(libc::EAGAIN))
}

fn commit(
    object: &dyn MapObject,
    group: &GroupKeys,
    transaction: &Transaction,
) -> Result<Done, CephErrno> {
    for _ in 0..ATTEMPTS {
        let mut map = GroupMap::decode(group, &object.read_map()?);
        if map.revision.is_empty() {
            create_if_missing(object)?;
            map.revision = FIRST_REVISION.to_owned();
        }
        let revision_of = |key: &String| map.keys.get(key).map_or(0, |found| found.revision);
        if transaction.conditions.iter().any(|it| revision_of(&it.key) != it.revision) {
            return Ok((StoreReply::Conflict, false));
        }
        let wanted: BTreeSet<LeaseId> =
            transaction.puts.iter().filter_map(|put| put.lease).collect();
        if !wanted.is_empty() && !wanted.is_subset(&object.leases(group)?) {
            return Ok((StoreReply::LeaseEnded, false));
        }
        let revision = map.next_revision();
        let puts = transaction.puts.iter().map(|put| {
            let value = KeyValue { revision, lease: put.lease, value: put.value.clone() };
            (format!("{}{}", group.prefix, put.key), value.encode())
        });
        let puts = puts.collect();
        match object.change_map(&map.change(group, puts, &[])) {
            Ok(()) => return Ok((StoreReply::Committed, true)),
            Err(CephErrno(libc::ECANCELED)) => {}
            Err(errno) => return Err(errno),
        }
    }
    Err(CephErrno(libc::EAGAIN))
}

impl GroupMap {
    fn decode(group: &GroupKeys, entries: &BTreeMap<String, String>) -> Self {
        let keys = entries.iter().filter_map(|(key, value)| {
            Some((key.strip_prefix(&group.prefix)?.to_owned(), KeyValue::decode(value)?))
        });
        let revision = entries.get(REVISION).cloned().unwrap_or_default();
        Self { revision, keys: keys.collect() }
    }

    fn next_revision(&self) -> u64 {
        self.revision.parse::<u64>().unwrap_or(0) + 1
    }

    /// A change of this map, and of no other.
    fn change(
        &self,
        group: &GroupKeys,
        mut puts: Vec<(String, String)>,
        removed: &[String],
    ) -> ObjectChange {
        puts.push((REVISION.to_owned(), self.next_revision().to_string()));
        ObjectChange {
            expected: (REVISION.to_owned(), self.revision.clone()),
            puts,
            removed: removed.iter().map(|key| format!("{}{key}", group.prefix)).collect(),
        }
    }

    fn snapshot(self) -> Snapshot {
        let entry = |value: KeyValue| Entry { value: value.value, revision: value.revision };
        Snapshot {
            entries: self.keys.into_iter().map(|(key, value)| (key, entry(value))).collect(),
        }
    }
}

impl KeyValue {
    fn encode(&self) -> String {
        let lease = self.lease.map_or(0, |lease| lease.0);
        format!("{} {lease}\n{}", self.revision, self.value)
    }

    fn decode(text: &str) -> Option<Self> {
        let (head, value) = text.split_once('\n')?;
        let (revision, lease) = head.split_once(' ')?;
        let lease: u64 = lease.parse().ok()?;
        let lease = (lease != 0).then_some(LeaseId(lease));
        Some(Self { revision: revision.parse().ok()?, lease, value: value.to_owned() })
    }
}

fn cookie(lease: LeaseId) -> String {
    format!("{:016x}", lease.0)
}

fn lease_of_cookie(text: &str) -> Option<LeaseId> {
    u64::from_str_radix(text, 16).ok().map(LeaseId)
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::collections::{BTreeMap, BTreeSet};
    use std::rc::Rc;

    use tenmil_base::{Instant, Random, Span};
    use tenmil_group::{
        Condition, LeaseId, Put, Store, StoreOperation, StoreReply, Transaction, check_store,
    };

    use super::{
        ATTEMPTS, CephErrno, GroupKeys, KeyValue, MapObject, ObjectChange, RadosStore,
        StoreCluster, execute,
    };
    use crate::RadosUri;

    /// An object in memory, with locks by a clock of the test.
    #[derive(Default)]
    struct TestedObject {
        now: Rc<Cell<Instant>>,
        exists: Cell<bool>,
        map: RefCell<BTreeMap<String, String>>,
        locks: RefCell<BTreeMap<LeaseId, Instant>>,
        /// Changes of another client between the next reads of the map and the changes that follow them.
        interferences: Cell<usize>,
    }

    impl MapObject for TestedObject {
        fn create(&self) -> Result<(), CephErrno> {
            if self.exists.replace(true) {
                return Err(CephErrno(libc::EEXIST));
            }
            self.map.borrow_mut().insert("revision".to_owned(), "0".to_owned());
            Ok(())
        }

        fn read_map(&self) -> Result<BTreeMap<String, String>, CephErrno> {
            Ok(self.map.borrow().clone())
        }

        fn change_map(&self, change: &ObjectChange) -> Result<(), CephErrno> {
            let mut map = self.map.borrow_mut();
            if self.interferences.get() > 0 {
                self.interferences.set(self.interferences.get() - 1);
                let revision: u64 = map["revision"].parse().unwrap();
                map.insert("revision".to_owned(), (revision + 1).to_string());
            }
            let (key, value) = &change.expected;
            // As an OSD does.
            if map.get(key) != Some(value) {
                return Err(CephErrno(libc::ECANCELED));
            }
            map.extend(change.puts.iter().cloned());
            map.retain(|key, _| !change.removed.contains(key));
            Ok(())
        }

        fn lock(&self, _: &GroupKeys, lease: LeaseId, time: Span) -> Result<(), CephErrno> {
            self.locks.borrow_mut().insert(lease, self.now.get().after(time));
            Ok(())
        }

        fn renew(&self, group: &GroupKeys, lease: LeaseId, time: Span) -> Result<(), CephErrno> {
            let is_held = self.leases(group)?.contains(&lease);
            if is_held { self.lock(group, lease, time) } else { Err(CephErrno(libc::ENOENT)) }
        }

        fn unlock(&self, group: &GroupKeys, lease: LeaseId) -> Result<(), CephErrno> {
            let is_held = self.leases(group)?.contains(&lease);
            self.locks.borrow_mut().remove(&lease);
            if is_held { Ok(()) } else { Err(CephErrno(libc::ENOENT)) }
        }

        fn leases(&self, _: &GroupKeys) -> Result<BTreeSet<LeaseId>, CephErrno> {
            self.locks.borrow_mut().retain(|_, ends_at| *ends_at > self.now.get());
            Ok(self.locks.borrow().keys().copied().collect())
        }
    }

    struct TestedStore<'a> {
        object: &'a TestedObject,
        group: GroupKeys,
        granted: BTreeMap<LeaseId, Span>,
        random: Random,
    }

    impl<'a> TestedStore<'a> {
        fn new(object: &'a TestedObject, group: &str) -> Self {
            let (group, random) = (GroupKeys::new(group), Random::new(1));
            Self { object, group, granted: BTreeMap::new(), random }
        }
    }

    impl Store for TestedStore<'_> {
        fn execute(&mut self, operation: &StoreOperation) -> StoreReply {
            let Self { object, group, granted, random } = self;
            match execute(*object, group, granted, random, operation) {
                Ok((reply, _)) => reply,
                Err(CephErrno(errno)) => StoreReply::Unknown(errno.to_string()),
            }
        }
    }

    fn put(key: &str, lease: Option<LeaseId>) -> StoreOperation {
        let put = Put { key: key.to_owned(), value: "v".to_owned(), lease };
        StoreOperation::Commit(Transaction { conditions: Vec::new(), puts: vec![put] })
    }

    #[test]
    fn store_in_an_object_is_one_as_the_one_in_memory() {
        let object = TestedObject::default();
        object.now.set(Instant { ns: 1 });
        let now = Rc::clone(&object.now);
        let mut wait = |time: Span| now.set(now.get().after(time));
        let mut store = TestedStore::new(&object, "g");
        check_store(&mut store, &mut wait, Span::from_secs(2)).unwrap();
    }

    /// For manual runs: `RADOS_STORE=rados:POOL/OBJECT?conf=PATH`.
    #[test]
    #[ignore = "needs a Ceph cluster"]
    fn store_in_a_cluster_is_one_as_the_one_in_memory() {
        let uri = RadosUri::parse(&std::env::var("RADOS_STORE").unwrap()).unwrap();
        let cluster = StoreCluster::new(&uri, Span::from_secs(2));
        let group = format!("conformance-{}", tenmil_linux::random_seed());
        let mut store = RadosStore::new(&cluster, &group, tenmil_linux::random_seed());
        let mut wait = tenmil_linux::named_thread::sleep;
        check_store(&mut store, &mut wait, Span::from_secs(2)).unwrap();
    }

    #[test]
    fn groups_of_one_object_do_not_see_each_other() {
        let object = TestedObject::default();
        let (mut one, mut other) =
            (TestedStore::new(&object, "g"), TestedStore::new(&object, "g2"));
        assert_eq!(one.execute(&put("a", None)), StoreReply::Committed);
        let StoreReply::Snapshot(seen) = other.execute(&StoreOperation::Read) else { panic!() };
        assert!(seen.entries.is_empty());
        assert_eq!(other.execute(&put("a", None)), StoreReply::Committed);
        let StoreReply::Snapshot(seen) = one.execute(&StoreOperation::Read) else { panic!() };
        assert_eq!(seen.revision_of("a"), 1);
    }

    #[test]
    fn object_of_another_program_is_left_as_it_is() {
        let object = TestedObject::default();
        object.exists.set(true);
        object.map.borrow_mut().insert("k".to_owned(), "v".to_owned());
        let mut store = TestedStore::new(&object, "g");
        let exists = StoreReply::Unknown(libc::EEXIST.to_string());
        assert_eq!(store.execute(&put("a", None)), exists);
        let grant = StoreOperation::Grant { time_to_live: Span::from_secs(2) };
        assert_eq!(store.execute(&grant), exists);
        assert_eq!(object.map.borrow().len(), 1);
    }

    #[test]
    fn transaction_is_repeated_when_others_change_the_map_and_gives_up_after_a_while() {
        let object = TestedObject::default();
        let mut store = TestedStore::new(&object, "g");
        object.interferences.set(3);
        assert_eq!(store.execute(&put("a", None)), StoreReply::Committed);
        let StoreReply::Snapshot(seen) = store.execute(&StoreOperation::Read) else { panic!() };
        assert_eq!(seen.revision_of("a"), 4, "behind three changes of another client");
        object.interferences.set(ATTEMPTS);
        let reply = store.execute(&put("a", None));
        assert_eq!(reply, StoreReply::Unknown(libc::EAGAIN.to_string()));
    }

    /// The condition holds until the key is deleted; then the transaction conflicts.
    #[test]
    fn key_of_a_lease_that_has_ended_is_deleted_once_and_conflicts_after_that() {
        let object = TestedObject::default();
        object.now.set(Instant { ns: 1 });
        let mut store = TestedStore::new(&object, "g");
        let grant = StoreOperation::Grant { time_to_live: Span::from_secs(2) };
        let StoreReply::Granted(lease) = store.execute(&grant) else { panic!() };
        assert_eq!(store.execute(&put("a", Some(lease))), StoreReply::Committed);
        object.now.set(object.now.get().after(Span::from_secs(2)));
        assert_eq!(store.execute(&StoreOperation::Renew(lease)), StoreReply::LeaseEnded);
        let mut other = TestedStore::new(&object, "g");
        let StoreReply::Snapshot(seen) = other.execute(&StoreOperation::Read) else { panic!() };
        assert!(seen.entries.is_empty());
        assert_eq!(object.map.borrow()["revision"], "2");
        let condition = Condition { key: "a".to_owned(), revision: 1 };
        let late = Transaction { conditions: vec![condition], puts: Vec::new() };
        assert_eq!(store.execute(&StoreOperation::Commit(late)), StoreReply::Conflict);
    }

    #[test]
    fn value_of_a_key_is_decoded_as_it_was_encoded() {
        let key = KeyValue { revision: 7, lease: Some(LeaseId(9)), value: "a b\nc".to_owned() };
        assert_eq!(KeyValue::decode(&key.encode()), Some(key));
        for wrong in ["", "7", "7 9", "x 9\nv", "7 x\nv"] {
            assert_eq!(KeyValue::decode(wrong), None, "{wrong:?}");
        }
    }
}
