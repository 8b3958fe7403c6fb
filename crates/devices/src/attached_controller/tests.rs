//! Attached controllers over a mock bus: memory of a lost device.

mod slow_controller;

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use tenmil_base::{Doorbell, Instant, InterruptVector, Mmio, RegionId};
use tenmil_dma::{DeviceKind, Region, RegionTable};
use tenmil_linux::EventFdVectors;
use tenmil_nvme_host::{Controller, ControllerOptions};

use super::dma::{MappedDma, QueueMemory};
use super::{AttachedState, ControllerBus};
use tenmil_base::Error;

#[derive(Clone)]
struct FakeBus {
    regions: RegionTable,
    state: Arc<Mutex<State>>,
    event: EventFdVectors,
}

#[derive(Default)]
struct State {
    shown: Vec<RegionId>,
    lost: Option<String>,
    /// Whether revoking the DMA access succeeds.
    revocation_succeeds: bool,
    /// Whether further mappings are rejected.
    is_full: bool,
}

/// Registers of a controller without any activity.
struct IdleRegisters;

struct IgnoredDoorbell;

impl FakeBus {
    fn new(regions: &RegionTable) -> Self {
        let state = Arc::new(Mutex::new(State { revocation_succeeds: true, ..State::default() }));
        Self { regions: regions.clone(), state, event: EventFdVectors::new(1).unwrap() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

impl ControllerBus for FakeBus {
    type Registers = IdleRegisters;
    type Doorbell = IgnoredDoorbell;

    const KIND: DeviceKind = DeviceKind::Emulated;

    fn name(&self) -> &str {
        "fake"
    }

    fn describe(&self) -> &'static str {
        "what a test has made"
    }

    fn registers(&self) -> IdleRegisters {
        IdleRegisters
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.event.descriptor(0).unwrap()
    }

    fn process_messages(&self) {}

    fn lost_reason(&self) -> Option<String> {
        self.state().lost.clone()
    }

    fn mark_lost(&self, why: &str) {
        self.state().lost.get_or_insert_with(|| why.to_owned());
    }

    fn map(&self, region: RegionId) -> Result<u64, Error> {
        let mut state = self.state();
        if state.is_full {
            return Err(Error::environment("no memory may be locked").with_hint("Lift it."));
        }
        if self.regions.len_bytes(region) == 0 {
            return Err(Error::environment("there is no such region"));
        }
        state.shown.push(region);
        Ok(u64::from(region.0 + 1) << 20)
    }

    fn unmap(&self, region: RegionId) -> bool {
        let mut state = self.state();
        let is_hidden = state.revocation_succeeds || !state.shown.contains(&region);
        state.shown.retain(|other| *other != region || !is_hidden);
        is_hidden
    }

    fn revoke_dma_access(&self) -> bool {
        self.state().revocation_succeeds
    }

    fn restore_dma_access(&self) {}

    fn interrupt_vector_count(&self) -> u32 {
        0
    }

    fn vector(&self, _: u16) -> Result<(Box<dyn InterruptVector + Send>, EventFdVectors), Error> {
        Err(Error::environment("there is none".to_owned()))
    }
}

impl Mmio for IdleRegisters {
    type Doorbell = IgnoredDoorbell;

    fn read32(&mut self, offset: u32) -> u32 {
        // Version 1.4; all other registers are zero.
        if offset == 8 { 0x0001_0400 } else { 0 }
    }

    fn read64(&mut self, _: u32) -> u64 {
        // CAP: NVM command set, timeout 10 s, 64 entries.
        1 << 37 | 20 << 24 | 1 << 16 | 63
    }

    fn write32(&mut self, _: u32, _: u32) {}

    fn write64(&mut self, _: u32, _: u64) {}

    fn doorbell(&mut self, _: u32) -> IgnoredDoorbell {
        IgnoredDoorbell
    }
}

impl Doorbell for IgnoredDoorbell {
    fn ring(&mut self, _: u32) {}
}

fn region(regions: &RegionTable) -> Region {
    regions.allocate_shared(64 << 10).unwrap()
}

fn queue_memory(regions: &RegionTable, bus: &FakeBus) -> QueueMemory<FakeBus> {
    let memory = regions.allocate_shared(2 << 20).unwrap();
    QueueMemory::new(memory, regions, bus.clone()).unwrap()
}

#[test]
fn mapped_memory_is_unmapped_when_the_device_is_dropped() {
    use tenmil_base::Dma;

    let regions = RegionTable::new(4);
    let bus = FakeBus::new(&regions);
    let queue_memory = queue_memory(&regions, &bus);
    let (one, other) = (region(&regions), region(&regions));
    for region in [&one, &other] {
        let iova = queue_memory.dma().iova(region.segment());
        assert_eq!(iova, Some(u64::from(region.id().0 + 1) << 20));
    }
    assert_eq!(bus.state().shown.len(), 3);
    drop(one);
    assert_eq!(bus.state().shown.len(), 2);
    let left = other.segment();
    drop(other);
    assert_eq!(queue_memory.dma().iova(left), None);
    drop(queue_memory);
    assert!(bus.state().shown.is_empty(), "the queues' memory, too");
}

#[test]
fn failed_mapping_is_reported_with_a_hint() {
    use tenmil_base::Dma;

    let regions = RegionTable::new(4);
    let bus = FakeBus::new(&regions);
    let queue_memory = queue_memory(&regions, &bus);
    let (one, other) = (region(&regions), region(&regions));
    assert_eq!(queue_memory.dma().mapping_error(), None);
    bus.state().is_full = true;
    assert_eq!(queue_memory.dma().iova(one.segment()), None);
    let complaint = queue_memory.dma().mapping_error().unwrap();
    assert_eq!(
        (complaint.text.as_str(), complaint.category),
        ("no memory may be locked", tenmil_base::ErrorCategory::Environment)
    );
    assert_eq!(complaint.hint.as_deref(), Some("Lift it."));
    bus.state().is_full = false;
    assert!(queue_memory.dma().iova(other.segment()).is_some());
    assert_eq!(queue_memory.dma().mapping_error(), None, "some data come");
}

#[test]
fn memory_that_a_lost_device_may_access_is_never_reused() {
    use tenmil_base::Dma;

    let regions = RegionTable::new(8);
    let bus = FakeBus::new(&regions);
    let queue_memory = queue_memory(&regions, &bus);
    let (during, after) = (region(&regions), region(&regions));
    for region in [&during, &after] {
        queue_memory.dma().iova(region.segment()).unwrap();
    }
    let kept = [&during, &after].map(|region| region.id().0 & 0xfff);
    bus.mark_lost("a test");
    bus.state().revocation_succeeds = false;
    drop(during);
    drop(queue_memory);
    drop(after);
    bus.state().revocation_succeeds = true;
    let others: Vec<Region> = (0..5).map(|_| region(&regions)).collect();
    assert!(others.iter().all(|other| !kept.contains(&(other.id().0 & 0xfff))));
    assert!(regions.allocate_shared(4096).is_err(), "three of eight are kept");
}

#[test]
fn queues_of_a_lost_device_fail_once_its_dma_is_revoked() {
    let regions = RegionTable::new(4);
    let bus = FakeBus::new(&regions);
    let queue_memory = queue_memory(&regions, &bus);
    let options = ControllerOptions { admin_depth: 32, ..ControllerOptions::default() };
    let dma: MappedDma<FakeBus> = queue_memory.dma().clone();
    let controller = Controller::new(bus.registers(), dma, options).unwrap();
    let mut kept = AttachedState {
        controller: Some(controller),
        completions: Vec::new(),
        lost: None,
        vectors_free: Vec::new(),
        vectors_used: [(1, bus.event.clone())].into(),
        asked_for: BTreeMap::new(),
        namespace: 1,
        size_watch: Arc::default(),
    };
    bus.state().revocation_succeeds = false;
    bus.mark_lost("a test");
    let now = Instant::default();
    for _ in 0..3 {
        kept.poll(&bus, now);
        assert!(kept.controller.is_some(), "it may still write to what was given to it");
        assert_eq!(kept.controller().err().unwrap().text, "fake: a test");
        assert!(!bus.event.clone().clear_signals(0));
    }
    bus.state().revocation_succeeds = true;
    kept.poll(&bus, now);
    assert!(kept.controller.is_none());
    assert!(bus.event.clone().clear_signals(0), "the sleeping thread is woken");
}
