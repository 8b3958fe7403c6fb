//! NVM subsystem: state shared by its controllers. It holds namespaces, reservations and firmware, and
//! delivers the updates of one controller to all others.
//!
//! ```text
//!    Controller ──┐                                   ┌──▶ Versioned<Namespaces> ──▶ its queues
//!    Controller ──┼─▶ Subsystem: Mutex<State> ─ entry ┤
//!    Controller ──┘      records by NSID              └──▶ PendingUpdates ──▶ its Controller, next poll
//! ```
//!
//! The lock is off the I/O path: admin and reservation commands take it, and a controller's poll only if
//! updates are pending. Queues read published snapshots and never take it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{BlockDevice, Error, Instant, Limits};
use tenmil_wire::Status;
use tenmil_wire::derived_uuid::derived_uuid;
use tenmil_wire::log::event::ReservationEvent;

use super::Controller;
use super::config::{
    ControllerConfig, NamespaceConfig, NamespacePool, ReservationPersistenceMode, SubsystemConfig,
};
use super::firmware::FirmwareSlots;
use super::reservation::change_queue::ChangeQueue;
use super::reservation::preempt_abort::PreemptedWriterGuard;
use super::reservation::{HostId, Reservations};
use crate::executor::FusedArbiter;
use crate::namespace::{
    CopyLimits, Namespace, NamespaceIdentity, NamespaceSnapshot, RevocableCacheInstance,
    VersionedValue,
};

mod controller_entry;
mod host_binding;
mod reservation_changes;
mod visibility;

pub use controller_entry::{AnaState, NamespaceRights, NamespaceSelection, WakeFn};
pub(super) use controller_entry::{ControllerEntry, NOTICES_MAX, PendingUpdates};
pub use host_binding::HostIdentifierInUse;
pub use reservation_changes::PersistRequest;
pub(super) use visibility::NamespaceVisibility;

/// Handle to a subsystem; cheap to clone.
#[derive(Clone)]
pub struct Subsystem {
    shared: Arc<SharedSubsystem>,
}

struct SharedSubsystem {
    info: SubsystemConstants,
    /// Number of updates posted. Stored with release order under the lock, so that a controller that
    /// loads the number finds the updates.
    updates_posted: AtomicU64,
    fused_arbiter: Arc<FusedArbiter>,
    state: Mutex<SubsystemState>,
}

/// Constant subsystem data.
pub(super) struct SubsystemConstants {
    pub(super) nqn: String,
    pub(super) serial: String,
    pub(super) model: String,
    pub(super) nsid_max: u32,
    pub(super) reservations: bool,
    pub(super) ana_groups: u32,
    /// Block sizes of new namespaces; empty without a pool.
    pub(super) pool_block_sizes: Vec<u32>,
}

/// Variable subsystem data, under the lock.
pub(super) struct SubsystemState {
    pub(super) records: BTreeMap<u32, NamespaceEntry>,
    pub(super) controllers: BTreeMap<u16, ControllerEntry>,
    pub(super) pool: Option<Box<dyn NamespacePool>>,
    pub(super) firmware: FirmwareSlots,
    /// Number of power cycles.
    pub(super) power_cycles: u64,
    /// Number of power losses while a host was active.
    pub(super) unsafe_shutdowns: u64,
    nsid_max: u32,
    posted_update_count: u64,
    /// Number of reservation changes ever started.
    changes: u64,
}

/// One namespace of the subsystem.
pub(super) struct NamespaceEntry {
    pub(super) nsid: u32,
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) limits: Limits,
    /// Logical block size in bytes, as a power of two.
    pub(super) block_shift: u8,
    pub(super) identity: NamespaceIdentity,
    pub(super) is_shared: bool,
    /// Whether it is attached to controllers created later.
    attaches_by_default: bool,
    pub(super) visibility: NamespaceVisibility,
    pub(super) ana_group: u32,
    pub(super) protection: WriteProtection,
    pub(super) reservations: Reservations,
    pub(super) persistence: ReservationPersistenceMode,
    pub(super) cache: Option<Arc<RevocableCacheInstance>>,
    pub(super) change_queue: ChangeQueue,
    pub(super) is_formatting: bool,
    /// Whether its space belongs to the pool.
    is_pooled: bool,
}

/// Namespace Write Protection State (Base 2.1 §8.1.16).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum WriteProtection {
    /// Writable.
    #[default]
    None = 0,
    /// Write protected until changed.
    Protected = 1,
    /// Write protected until the next power cycle.
    UntilPowerCycle = 2,
    /// Permanently write protected.
    Permanent = 3,
}

impl Subsystem {
    /// Creates a subsystem. The error is one line with the value found and the value expected.
    pub fn new(config: SubsystemConfig) -> Result<Self, Error> {
        check_ascii_field("nqn", &config.nqn, 223)?;
        check_ascii_field("serial", &config.serial, 20)?;
        check_ascii_field("model", &config.model, 40)?;
        check_ascii_field("firmware", &config.firmware, 8)?;
        if !(1..=1 << 16).contains(&config.nsid_max) {
            let found = config.nsid_max;
            return Err(Error::environment(format!(
                "configure subsystem: nsid_max is {found}, expected 1 to 65536"
            )));
        }
        let info = SubsystemConstants {
            nqn: config.nqn,
            serial: config.serial,
            model: config.model,
            nsid_max: config.nsid_max,
            reservations: config.reservations,
            ana_groups: config.ana_groups,
            pool_block_sizes: config
                .pool
                .as_ref()
                .map_or_else(Vec::new, |pool| pool.block_sizes().to_vec()),
        };
        let state = SubsystemState {
            records: BTreeMap::new(),
            controllers: BTreeMap::new(),
            pool: config.pool,
            firmware: FirmwareSlots::new(&config.firmware),
            power_cycles: 1,
            unsafe_shutdowns: 0,
            nsid_max: config.nsid_max,
            posted_update_count: 0,
            changes: 0,
        };
        let (updates_posted, fused_arbiter) = (AtomicU64::new(0), Arc::default());
        let shared =
            SharedSubsystem { info, updates_posted, fused_arbiter, state: Mutex::new(state) };
        let subsystem = Self { shared: Arc::new(shared) };
        for namespace in config.namespaces {
            subsystem.add_namespace(namespace)?;
        }
        Ok(subsystem)
    }

    /// Fused-command arbiter for the queues of all controllers.
    pub(super) fn fused_arbiter(&self) -> &Arc<FusedArbiter> {
        &self.shared.fused_arbiter
    }

    /// Opens a controller. The error is one line with the value found and the value expected.
    pub fn open_controller(
        &self,
        now: Instant,
        config: ControllerConfig,
    ) -> Result<Controller, Error> {
        config.validate()?;
        Controller::open(self.clone(), now, config)
    }

    /// Adds a namespace and returns its identifier; controllers that attach it are notified.
    pub fn add_namespace(&self, config: NamespaceConfig) -> Result<u32, Error> {
        self.add_namespace_visible_to(config, |_| true)
    }

    /// Adds a namespace that only the existing controllers selected by `is_visible` can see. Controllers
    /// created later can see it.
    pub fn add_namespace_visible_to(
        &self,
        config: NamespaceConfig,
        is_visible: impl Fn(u16) -> bool,
    ) -> Result<u32, Error> {
        self.check_namespace(&config)?;
        let mut state = self.lock_state();
        let nsid = match config.nsid {
            Some(nsid) => nsid,
            None => state
                .lowest_free_nsid()
                .ok_or("add namespace: every identifier is in use")
                .map_err(Error::environment)?,
        };
        if state.records.contains_key(&nsid) {
            return Err(Error::environment(format!(
                "add namespace: identifier {nsid} is in use, expected a free one"
            )));
        }
        let limits = config.device.limits();
        let block_size = config.block_size.unwrap_or(limits.block_size);
        let mut record = NamespaceEntry::new(nsid, config.device, limits, block_size);
        record.identity = self.namespace_identity(nsid, config.identity);
        record.is_shared = config.is_shared;
        record.attaches_by_default = config.is_attached;
        record.reservations = load_reservations(&config.persistence)?;
        record.persistence = config.persistence;
        record.cache = config.cache;
        record.ana_group = config.ana_group.max(1);
        if config.is_read_only {
            record.protection = WriteProtection::Permanent;
        }
        state.check_registrant_bindings(&record)?;
        for &cntlid in state.controllers.keys().filter(|cntlid| !is_visible(**cntlid)) {
            record.visibility.hide(cntlid);
        }
        state.records.insert(nsid, record);
        if config.is_attached {
            // A private namespace is attached to one controller only.
            let count_max = if config.is_shared { usize::MAX } else { 1 };
            let cntlids = state.controllers.keys().copied().filter(|cntlid| is_visible(*cntlid));
            let cntlids: Vec<u16> = cntlids.take(count_max).collect();
            state.attach_namespace(nsid, &cntlids);
        }
        self.publish_and_notify(state);
        Ok(nsid)
    }

    /// Checks that a namespace can be added, except that its identifier may be in use. The error is one
    /// line with the value found and the value expected.
    pub fn check_namespace(&self, config: &NamespaceConfig) -> Result<(), Error> {
        let limits = config.device.limits();
        if limits.metadata_size != 0 {
            let size = limits.metadata_size;
            return Err(Error::environment(format!(
                "add namespace: {size} bytes of metadata per block, expected none"
            )));
        }
        let block_size = config.block_size.unwrap_or(limits.block_size);
        if !formattable_block_sizes(&limits).contains(&block_size) {
            let sizes: Vec<String> =
                formattable_block_sizes(&limits).iter().map(u32::to_string).collect();
            let expected = sizes.join(" or ");
            return Err(Error::environment(format!(
                "add namespace: block size is {block_size}, expected {expected}"
            )));
        }
        let groups = self.constants().ana_groups;
        if groups > 0 && !(1..=groups).contains(&config.ana_group) {
            let group = config.ana_group;
            return Err(Error::environment(format!(
                "add namespace: ANA group is {group}, expected 1 to {groups}"
            )));
        }
        load_reservations(&config.persistence)?;
        let max = self.constants().nsid_max;
        match config.nsid {
            Some(nsid) if !(1..=max).contains(&nsid) => Err(Error::environment(format!(
                "add namespace: identifier is {nsid}, expected 1 to {max}"
            ))),
            _ => Ok(()),
        }
    }

    /// Removes a namespace; its controllers are notified.
    pub fn remove_namespace(&self, nsid: u32) -> bool {
        let mut state = self.lock_state();
        let removed = state.delete_namespace(nsid);
        self.publish_and_notify(state);
        removed
    }

    /// Hides a namespace from a controller, before its host has seen it.
    pub fn hide_new_namespace(&self, cntlid: u16, nsid: u32) {
        let mut state = self.lock_state();
        if let Some(record) = state.records.get_mut(&nsid) {
            record.visibility.hide(cntlid);
        }
        self.publish_and_notify(state);
    }

    /// Attaches a namespace to a controller or hides it from the controller, which is notified of a
    /// change.
    pub fn set_namespace_visible(&self, cntlid: u16, nsid: u32, is_shown: bool) {
        let mut state = self.lock_state();
        if state.controllers.contains_key(&cntlid) {
            state.set_namespace_visible(cntlid, nsid, is_shown);
        }
        self.publish_and_notify(state);
    }

    /// Rereads the size of a namespace's block device, and notifies controllers of a change.
    pub fn reread_namespace_size(&self, nsid: u32) {
        let mut state = self.lock_state();
        if let Some(record) = state.records.get_mut(&nsid) {
            let limits = record.device.limits();
            if limits != record.limits {
                record.block_shift = record.block_shift.max(block_size_shift(limits.block_size));
                record.limits = limits;
                state.notify_namespace_changed(nsid);
            }
        }
        self.publish_and_notify(state);
    }

    /// Replaces the block device of a namespace, whose identity, ANA group and reservations stay: queues open
    /// channels to the new one and close those to the old one when their commands have completed. Controllers
    /// are notified if the size is another. Returns false if there is no such namespace.
    pub fn replace_namespace_device(&self, nsid: u32, device: Arc<dyn BlockDevice>) -> bool {
        let mut state = self.lock_state();
        let Some(record) = state.records.get_mut(&nsid) else { return false };
        let limits = device.limits();
        let is_other_size = (limits.block_size, limits.block_count)
            != (record.limits.block_size, record.limits.block_count);
        record.block_shift = block_size_shift(limits.block_size);
        (record.device, record.limits) = (device, limits);
        if is_other_size {
            state.notify_namespace_changed(nsid);
        }
        self.publish_and_notify(state);
        true
    }

    /// Sets the ANA state of a group for a controller, and notifies the controller.
    pub fn set_ana_state(&self, cntlid: u16, group: u32, ana: AnaState) {
        let mut state = self.lock_state();
        if let Some(entry) = state.controllers.get_mut(&cntlid) {
            entry.set_ana_state(group, ana);
            state.posted_update_count += 1;
        }
        self.publish_and_notify(state);
    }

    /// Sets the rights of a controller's host, and notifies the controller of each namespace whose
    /// attributes change with them.
    pub fn set_namespace_rights(&self, cntlid: u16, rights: NamespaceRights) {
        let mut state = self.lock_state();
        state.set_namespace_rights(cntlid, rights);
        self.publish_and_notify(state);
    }

    /// Emulates a power cycle: drops all state that does not persist.
    pub fn emulate_power_cycle(&self) {
        let mut state = self.lock_state();
        state.power_cycles += 1;
        if state.controllers.values().any(|entry| entry.is_in_use) {
            state.unsafe_shutdowns += 1;
        }
        for record in state.records.values_mut() {
            record.reservations.handle_power_cycle();
            record.change_queue.apply_to_state_being_written(Reservations::handle_power_cycle);
            if record.protection == WriteProtection::UntilPowerCycle {
                record.protection = WriteProtection::None;
            }
        }
        state.firmware.activate();
        self.publish_and_notify(state);
    }

    /// Constant subsystem data.
    pub(super) fn constants(&self) -> &SubsystemConstants {
        &self.shared.info
    }

    /// Takes the lock.
    pub(super) fn lock_state(&self) -> MutexGuard<'_, SubsystemState> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes changes, releases the lock, and wakes the controllers with new updates.
    pub(super) fn publish_and_notify(&self, mut state: MutexGuard<'_, SubsystemState>) {
        state.publish_snapshots();
        // Under the lock; pairs with the acquire load in `posted_update_count`.
        self.shared.updates_posted.store(state.posted_update_count, Ordering::Release);
        let wakers: Vec<WakeFn> =
            state.controllers.values().filter_map(ControllerEntry::waker_if_pending).collect();
        drop(state);
        wakers.iter().for_each(|waker| waker());
    }

    /// Total number of updates posted. While it is unchanged, the lock need not be taken.
    pub(super) fn posted_update_count(&self) -> u64 {
        self.shared.updates_posted.load(Ordering::Acquire)
    }

    /// Returns `given`, or a UUID derived from the names of subsystem and namespace (version 8 of RFC
    /// 9562).
    pub(super) fn namespace_identity(
        &self,
        nsid: u32,
        given: NamespaceIdentity,
    ) -> NamespaceIdentity {
        if given != NamespaceIdentity::default() {
            return given;
        }
        let uuid = derived_uuid(&self.constants().nqn, nsid);
        NamespaceIdentity { uuid, ..given }
    }
}

impl SubsystemState {
    /// Lowest free identifier.
    pub(super) fn lowest_free_nsid(&self) -> Option<u32> {
        (1..=self.nsid_max).find(|nsid| !self.records.contains_key(nsid))
    }

    /// Creates a namespace in the pool, not attached to any controller.
    pub(super) fn create_namespace(
        &mut self,
        nsid: u32,
        block_size: u32,
        block_count: u64,
        describe: impl FnOnce(&mut NamespaceEntry),
    ) -> Result<(), Status> {
        let wanted = u128::from(block_size) * u128::from(block_count);
        if wanted > u128::from(self.unallocated_bytes()) {
            return Err(Status::NAMESPACE_INSUFFICIENT_CAPACITY);
        }
        let pool = self.pool.as_mut().ok_or(Status::INVALID_OPCODE)?;
        let device = pool
            .create_block_device(block_size, block_count)
            .map_err(|_| Status::INTERNAL_ERROR)?;
        let limits = device.limits();
        let mut record = NamespaceEntry::new(nsid, device, limits, block_size);
        record.is_pooled = true;
        describe(&mut record);
        self.records.insert(nsid, record);
        Ok(())
    }

    /// Deletes a namespace and notifies the controllers that had attached it.
    pub(super) fn delete_namespace(&mut self, nsid: u32) -> bool {
        self.notify_namespace_changed(nsid);
        let removed = self.records.remove(&nsid);
        let is_removed = removed.is_some();
        if let Some(record) = removed {
            self.cancel_changes(record.change_queue);
        }
        is_removed
    }

    /// Attaches a namespace to these controllers and notifies them.
    pub(super) fn attach_namespace(&mut self, nsid: u32, cntlids: &[u16]) {
        if let Some(record) = self.records.get_mut(&nsid) {
            cntlids.iter().for_each(|cntlid| record.visibility.attach(*cntlid));
        }
        self.notify_namespace_changed(nsid);
    }

    fn set_namespace_visible(&mut self, cntlid: u16, nsid: u32, is_shown: bool) {
        let Some(record) = self.records.get_mut(&nsid) else { return };
        let is_change = record.visibility.is_attached_to(cntlid) != is_shown;
        match is_shown {
            true => record.visibility.reveal(cntlid),
            // Only attached controllers are notified, so the notification precedes the hiding.
            false if is_change => self.notify_namespace_changed(nsid),
            false => {}
        }
        if is_shown && is_change {
            self.attach_namespace(nsid, &[cntlid]);
        }
        if !is_shown && let Some(record) = self.records.get_mut(&nsid) {
            record.visibility.hide(cntlid);
        }
    }

    fn set_namespace_rights(&mut self, cntlid: u16, rights: NamespaceRights) {
        let Self { controllers, records, posted_update_count, .. } = self;
        let Some(entry) = controllers.get_mut(&cntlid) else { return };
        let before = entry.rights().read_only.clone();
        if !entry.set_rights(rights) {
            return;
        }
        let after = &entry.rights().read_only;
        let differs = |nsid: &u32| before.contains(*nsid) != after.contains(*nsid);
        let is_attached = |nsid: &u32| {
            records.get(nsid).is_some_and(|record| record.visibility.is_attached_to(cntlid))
        };
        let changed: Vec<u32> =
            records.keys().copied().filter(|nsid| differs(nsid) && is_attached(nsid)).collect();
        // A host that has sent no command has seen no attribute.
        if entry.is_in_use {
            entry.updates.changed.extend(changed);
            *posted_update_count += 1;
        }
    }

    /// Detaches a namespace from these controllers and notifies them.
    pub(super) fn detach_namespace(&mut self, nsid: u32, cntlids: &[u16]) {
        self.notify_namespace_changed(nsid);
        if let Some(record) = self.records.get_mut(&nsid) {
            cntlids.iter().for_each(|cntlid| record.visibility.detach(*cntlid));
        }
    }

    /// Posts a namespace attribute change to every controller that has `nsid` attached.
    pub(super) fn notify_namespace_changed(&mut self, nsid: u32) {
        let Some(record) = self.records.get(&nsid) else { return };
        for cntlid in record.visibility.attached_cntlids_from(0) {
            if let Some(entry) = self.controllers.get_mut(&cntlid) {
                entry.updates.changed.insert(nsid);
            }
        }
        self.posted_update_count += 1;
    }

    /// Posts an upcoming firmware activation to all controllers.
    pub(super) fn post_firmware_activation(&mut self) {
        for entry in self.controllers.values_mut() {
            entry.updates.is_activating_firmware = true;
        }
        self.posted_update_count += 1;
    }

    /// Posts a reservation notification for `nsid` to the controllers of a host.
    pub(super) fn notify_reservation(&mut self, nsid: u32, host: HostId, notice: ReservationEvent) {
        let Some(record) = self.records.get(&nsid) else { return };
        for (&cntlid, entry) in self.controllers.iter_mut().filter(|(_, entry)| entry.host == host)
        {
            if record.visibility.is_visible_to(cntlid) {
                entry.updates.push_notice(nsid, notice);
            }
        }
        self.posted_update_count += 1;
    }

    /// Posts an abort of the outstanding commands of `nsid` to the controllers of a host.
    pub(super) fn post_namespace_abort(
        &mut self,
        nsid: u32,
        host: HostId,
        preempted: &PreemptedWriterGuard,
    ) {
        for entry in self.controllers.values_mut().filter(|entry| entry.host == host) {
            entry.updates.aborts.push((nsid, preempted.clone()));
        }
        self.posted_update_count += 1;
    }

    /// Free space of the pool.
    pub(super) fn unallocated_bytes(&self) -> u64 {
        let capacity = self.pool.as_ref().map_or(0, |pool| pool.capacity_bytes());
        let pooled = self.records.values().filter(|record| record.is_pooled);
        let used: u64 = pooled.map(NamespaceEntry::capacity_bytes).sum();
        capacity.saturating_sub(used)
    }

    /// Total capacity: the pool and the namespaces outside of it.
    pub(super) fn capacity_bytes(&self) -> u128 {
        let pool = self.pool.as_ref().map_or(0, |pool| pool.capacity_bytes());
        let fixed = self.records.values().filter(|record| !record.is_pooled);
        u128::from(pool) + fixed.map(|record| u128::from(record.capacity_bytes())).sum::<u128>()
    }

    /// Adds a new controller and attaches the namespaces that are attached by default.
    fn add_controller(&mut self, cntlid: u16, entry: ControllerEntry) {
        for record in self.records.values_mut() {
            if record.attaches_by_default
                && (record.is_shared || record.visibility.attached_count() == 0)
            {
                record.visibility.attach(cntlid);
            }
        }
        self.controllers.insert(cntlid, entry);
    }

    /// Builds the namespace snapshot of every controller, and publishes those that have changed.
    fn publish_snapshots(&mut self) {
        for (&cntlid, entry) in &mut self.controllers {
            let mut namespaces = NamespaceSnapshot::new(self.nsid_max);
            let records = self.records.values();
            for record in records.filter(|record| record.visibility.is_attached_to(cntlid)) {
                namespaces.insert(Arc::new(record.snapshot_for(entry)));
            }
            entry.publish_if_changed(namespaces);
        }
    }
}

impl Subsystem {
    /// Adds a controller.
    pub(super) fn add_controller(
        &self,
        cntlid: u16,
    ) -> Result<Arc<VersionedValue<NamespaceSnapshot>>, Error> {
        let mut state = self.lock_state();
        if state.controllers.contains_key(&cntlid) {
            return Err(Error::environment(format!(
                "open controller: identifier {cntlid} is in use"
            )));
        }
        let published =
            Arc::new(VersionedValue::new(Arc::new(NamespaceSnapshot::new(state.nsid_max))));
        state.add_controller(cntlid, ControllerEntry::new(cntlid, published.clone()));
        self.publish_and_notify(state);
        Ok(published)
    }

    /// Removes a controller.
    pub(super) fn remove_controller(&self, cntlid: u16) {
        let mut state = self.lock_state();
        state.drop_requesters(cntlid, |_| true);
        state.controllers.remove(&cntlid);
        for record in state.records.values_mut() {
            record.visibility.remove_controller(cntlid);
        }
        state.remove_anonymous_host(HostId::Anonymous(cntlid));
        self.publish_and_notify(state);
    }
}

impl NamespaceEntry {
    fn new(nsid: u32, device: Arc<dyn BlockDevice>, limits: Limits, block_size: u32) -> Self {
        Self {
            nsid,
            device,
            limits,
            block_shift: block_size_shift(block_size),
            identity: NamespaceIdentity::default(),
            is_shared: false,
            attaches_by_default: false,
            visibility: NamespaceVisibility::default(),
            ana_group: 1,
            protection: WriteProtection::None,
            reservations: Reservations::default(),
            persistence: ReservationPersistenceMode::default(),
            cache: None,
            change_queue: ChangeQueue::default(),
            is_formatting: false,
            is_pooled: false,
        }
    }

    /// Number of logical blocks (NSZE).
    pub(super) fn block_count(&self) -> u64 {
        self.limits.block_count
            >> self.block_shift.saturating_sub(block_size_shift(self.limits.block_size))
    }

    /// Capacity of the block device in bytes.
    pub(super) fn capacity_bytes(&self) -> u64 {
        self.limits.block_count.saturating_mul(self.limits.block_size.into())
    }

    /// Whether it is write protected.
    pub(super) fn is_write_protected(&self) -> bool {
        self.protection != WriteProtection::None
    }

    /// Namespace as seen by a controller's queues.
    fn snapshot_for(&self, entry: &ControllerEntry) -> Namespace {
        let formatting = self.is_formatting.then_some(Status::FORMAT_IN_PROGRESS);
        let rights = entry.rights();
        let is_read_only = rights.read_only.contains(self.nsid);
        Namespace {
            nsid: self.nsid,
            block_shift: self.block_shift,
            metadata_size: self.limits.metadata_size,
            block_count: self.block_count(),
            is_write_protected: self.is_write_protected() || is_read_only,
            denies_reservations: is_read_only || !rights.reservations,
            unavailable: formatting.or_else(|| entry.ana_state(self.ana_group).rejection_status()),
            reservation: self.reservations.as_seen_by(entry.host),
            identity: self.identity,
            copy: CopyLimits::DEFAULT,
            limits: self.limits.clone(),
            device: self.device.clone(),
            cache: self.cache.clone(),
        }
    }
}

impl WriteProtection {
    /// State with this code.
    pub(super) fn from_code(code: u32) -> Option<Self> {
        [Self::None, Self::Protected, Self::UntilPowerCycle, Self::Permanent]
            .into_iter()
            .find(|state| *state as u32 == code)
    }
}

/// Loads the persisted reservations.
fn load_reservations(persistence: &ReservationPersistenceMode) -> Result<Reservations, Error> {
    let ReservationPersistenceMode::Durable(store) = persistence else {
        return Ok(Reservations::default());
    };
    match store.load()? {
        Some(record) => Reservations::from_record(&record)
            .map_err(|why| format!("add namespace: its reservations cannot be read: {why}"))
            .map_err(Error::environment),
        None => Ok(Reservations::default()),
    }
}

/// Block sizes with which a namespace on such a block device can be formatted: its own, and those of 512
/// and 4096 that are larger.
pub(super) fn formattable_block_sizes(limits: &Limits) -> Vec<u32> {
    let larger = [512, 4096].into_iter().filter(|&size| size > limits.block_size);
    [limits.block_size].into_iter().chain(larger).collect()
}

/// Block size as a power of two.
pub(super) fn block_size_shift(block_size: u32) -> u8 {
    u8::try_from(block_size.trailing_zeros()).unwrap_or(0)
}

fn check_ascii_field(what: &str, text: &str, bytes_max: usize) -> Result<(), Error> {
    if text.is_empty()
        || text.len() > bytes_max
        || !text.bytes().all(|byte| (b' '..=b'~').contains(&byte))
    {
        return Err(Error::environment(format!(
            "configure subsystem: {what} is \"{}\", expected 1 to {bytes_max} printable ASCII characters",
            text.escape_debug()
        )));
    }
    Ok(())
}
