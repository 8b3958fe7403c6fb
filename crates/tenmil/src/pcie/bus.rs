//! What an SSD on the PCI bus is reached by.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{BarPart, Blame, NoDeviceMemory, RegionId, Segment, Vector};
use dma::{DeviceKind, NoRegion, Region, Regions};
use host::{EventVectors, Steps};
use vfio::{Bar, Function, Isolation, NotAttached, Place, Way};

use super::name::PcieName;
use super::registers::{Register, Registers};
use super::vector::FunctionVector;
use crate::Refused;
use crate::attached::Bus;

/// A function that VFIO has handed to us.
#[derive(Clone)]
pub(super) struct PcieBus {
    shared: Arc<Shared>,
}

struct Shared {
    bar: Bar,
    name: String,
    isolation: Isolation,
    way: Way,
    /// How many vectors signal when they are asked to.
    vectors: u32,
    /// The kernel wants the function back, or the bus reports an error: one descriptor for each.
    alarms: EventVectors,
    kept: Mutex<Kept>,
}

struct Kept {
    /// None once it is the kernel's again.
    function: Option<Arc<Function>>,
    /// What it was shown, and where it finds that.
    shown: BTreeMap<RegionId, u64>,
    /// The part of a BAR with memory of the function's own, once somebody wanted it.
    memory: Option<Bar>,
    lost: Option<String>,
    /// It was not kept from memory when it should have been, and no IOMMU does that either: what it was
    /// shown is its own.
    is_at_large: bool,
}

/// Which alarm is which.
const WANTED_BACK: u16 = 0;
const BUS_ERROR: u16 = 1;
/// What to do about memory that an SSD without an IOMMU would not find.
const NAMED_FIRST: &str = "Name it on the command line of a command, before devices that hold memory; \
                           programs and changed files of `serve` cannot add one.";

impl PcieBus {
    pub(super) fn open(
        name: &PcieName,
        regions: &Regions,
        steps: &mut Steps,
    ) -> Result<Self, Refused> {
        if name.isolation == Isolation::None && !regions.lay_rows() {
            return Err(Refused::caller(format!(
                "attach {}: unsafe-no-iommu: memory was handed out already that does not lie in a \
                 row, expected none",
                name.address
            ))
            .with_hint(NAMED_FIRST));
        }
        let function = Function::open(&Place::default(), &name.address, name.isolation, regions);
        let function = function.map_err(|why| refused(&why))?;
        steps.done("take it from VFIO");
        function.start().map_err(|why| refused(&why))?;
        steps.done("reset it");
        if let Some(why) = function.instead() {
            tracing::info!("{}:{}: through its group: {why}", PcieName::SCHEME, name.address);
        }
        let machine = |what: &str, error: std::io::Error| {
            Refused::machine(format!("attach {}: {what}: {error}", name.address))
        };
        let bar = function.bar(regions).map_err(|error| machine("map BAR 0", error))?;
        let vectors = function.vectors().min(u32::from(name.wanted.queues) + 1);
        let has_vectors = vectors > 1 && function.prepare_vectors(vectors).is_ok();
        let alarms = EventVectors::new(2).map_err(|error| machine("make an event", error))?;
        // A kernel that tells neither leaves it to reads of ones.
        if let Some(event) = alarms.descriptor(WANTED_BACK) {
            let _ = function.signal_request(event);
        }
        if let Some(event) = alarms.descriptor(BUS_ERROR) {
            let _ = function.signal_error(event);
        }
        steps.done("map its registers, and have its vectors signal");
        let way = function.way();
        let function = Some(Arc::new(function));
        let shown = BTreeMap::new();
        let kept = Kept { function, shown, memory: None, lost: None, is_at_large: false };
        let shared = Shared {
            bar,
            name: format!("{}:{}", PcieName::SCHEME, name.address),
            isolation: name.isolation,
            way,
            vectors: if has_vectors { vectors } else { 0 },
            alarms,
            kept: Mutex::new(kept),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.shared.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Bus for PcieBus {
    type Registers = Registers;
    type Doorbell = Register;

    const KIND: DeviceKind = DeviceKind::Pcie;

    fn name(&self) -> &str {
        &self.shared.name
    }

    fn what(&self) -> &'static str {
        match (self.shared.isolation, self.shared.way) {
            (Isolation::Iommu { .. }, Way::Iommufd) => {
                "an SSD on the PCI bus, over VFIO and iommufd"
            }
            (Isolation::Iommu { .. }, Way::Group) => "an SSD on the PCI bus, over a group of VFIO",
            (Isolation::None, _) => {
                "an SSD on the PCI bus, over VFIO, which no IOMMU keeps from any memory"
            }
        }
    }

    fn registers(&self) -> Registers {
        Registers::new(self.shared.bar.clone())
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.alarms.descriptor(WANTED_BACK).expect("it was made with two")
    }

    fn carry(&self) {
        let shared = &self.shared;
        if shared.alarms.clear(WANTED_BACK) {
            self.lose("the kernel wants it back: it is being removed or unbound");
        }
        if shared.alarms.clear(BUS_ERROR) {
            self.lose("the PCI bus reports an error of it");
        }
        let memory_has_failed = self.lock().memory.as_ref().is_some_and(Bar::has_failed);
        if shared.bar.has_failed() || memory_has_failed {
            self.lose("its registers are gone: it was pulled or lost its power");
        }
    }

    fn lost(&self) -> Option<String> {
        self.lock().lost.clone()
    }

    fn lose(&self, why: &str) {
        self.lock().lost.get_or_insert_with(|| why.to_owned());
    }

    fn allocate(&self, regions: &Regions, len_bytes: usize) -> Result<Region, NoRegion> {
        match self.shared.isolation {
            Isolation::Iommu { .. } => regions.allocate_shared(len_bytes),
            Isolation::None => regions.allocate(len_bytes),
        }
    }

    fn show(&self, region: RegionId) -> Result<u64, Refused> {
        let mut kept = self.lock();
        if let Some(iova) = kept.shown.get(&region) {
            return Ok(*iova);
        }
        let gone = || Refused::peer("the kernel has it back");
        let shown = kept.function.as_ref().ok_or_else(gone)?.container().show(region);
        let iova = shown.map_err(|why| {
            let hint = why.hint();
            Refused { hint, ..Refused::machine(why.to_string()) }
        })?;
        kept.shown.insert(region, iova);
        Ok(iova)
    }

    fn hide(&self, region: RegionId) -> bool {
        let mut kept = self.lock();
        if kept.is_at_large && kept.shown.contains_key(&region) {
            return false;
        }
        let Some(function) = kept.function.as_ref().filter(|_| kept.shown.contains_key(&region))
        else {
            return true;
        };
        let is_gone = function.container().hide(region).is_ok();
        if is_gone {
            kept.shown.remove(&region);
        }
        is_gone
    }

    /// It is kept from being master of the bus; one that is not there any more reaches nothing. If
    /// that was for good, the kernel has it back.
    fn cut_off(&self) -> bool {
        let mut kept = self.lock();
        let Some(function) = kept.function.clone() else { return true };
        let is_cut = function.let_reach(false).is_ok() || !function.is_there();
        kept.is_at_large = !is_cut && self.shared.isolation == Isolation::None;
        if is_cut && kept.lost.is_some() {
            for region in std::mem::take(&mut kept.shown).into_keys() {
                // What the kernel keeps goes with the container.
                let _ = function.container().hide(region);
            }
            // A mapping is a handle on the function, too.
            self.shared.bar.let_go();
            kept.memory.iter().for_each(Bar::let_go);
            kept.function = None;
        }
        is_cut
    }

    fn reconnect(&self) {
        let function = self.lock().function.clone();
        if function.is_none_or(|function| function.let_reach(true).is_err()) {
            self.lose("its configuration cannot be written any more");
        }
    }

    fn device_memory(&self, part: BarPart) -> Result<(Segment, u64), NoDeviceMemory> {
        let gone = NoDeviceMemory::Unusable { why: "the kernel has it back" };
        let function = self.lock().function.clone().ok_or(gone)?;
        // A region that is not mapped in the end is taken away here, so nobody may be in here now.
        let (memory, address) = function.memory(part, self.shared.bar.regions())?;
        let segment = memory.segment();
        self.lock().memory = Some(memory);
        Ok((segment, address))
    }

    fn vectors(&self) -> u32 {
        self.shared.vectors
    }

    fn vector(&self, number: u16) -> Result<(Box<dyn Vector + Send>, EventVectors), String> {
        let function = self.lock().function.clone().ok_or("the kernel has it back")?;
        let vector = FunctionVector::new(&function, number)?;
        let event = vector.event();
        Ok((Box::new(vector), event))
    }
}

fn refused(why: &NotAttached) -> Refused {
    let blame = match why {
        NotAttached::Absent { .. } | NotAttached::Driver { .. } | NotAttached::Class { .. } => {
            Blame::Caller
        }
        _ => Blame::Machine,
    };
    Refused { hint: why.hint(), ..Refused::of(blame, why.to_string()) }
}
