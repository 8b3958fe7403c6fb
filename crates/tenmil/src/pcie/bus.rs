//! What an SSD on the PCI bus is reached by.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{Blame, RegionId, Segment, Vector};
use dma::{DeviceKind, Regions};
use host::EventVectors;
use vfio::{Bar, Function, Mapped, NotAttached, Place};

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
    function: Arc<Function>,
    bar: Bar,
    name: String,
    regions: Regions,
    /// How many vectors signal when they are asked to.
    vectors: u32,
    /// The kernel wants the function back, or the bus reports an error: one descriptor for each.
    alarms: EventVectors,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    mapped: BTreeMap<RegionId, Mapped>,
    lost: Option<String>,
}

/// Which alarm is which.
const WANTED_BACK: u16 = 0;
const BUS_ERROR: u16 = 1;

impl PcieBus {
    pub(super) fn open(name: &PcieName, regions: &Regions) -> Result<Self, Refused> {
        let function = Function::open(&Place::default(), &name.address, regions);
        let function = function.map_err(|why| refused(&why))?;
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
        let shared = Shared {
            function: Arc::new(function),
            bar,
            name: format!("{}:{}", PcieName::SCHEME, name.address),
            regions: regions.clone(),
            vectors: if has_vectors { vectors } else { 0 },
            alarms,
            kept: Mutex::default(),
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
        if shared.bar.has_failed() {
            self.lose("its registers are gone: it was pulled or lost its power");
        }
    }

    fn lost(&self) -> Option<String> {
        self.lock().lost.clone()
    }

    fn lose(&self, why: &str) {
        self.lock().lost.get_or_insert_with(|| why.to_owned());
    }

    fn show(&self, region: RegionId, iova: u64) -> Result<(), String> {
        let mut kept = self.lock();
        if kept.mapped.contains_key(&region) {
            return Ok(());
        }
        let container = self.shared.function.container();
        let stale = kept.mapped.iter().find(|(_, mapped)| mapped.iova == iova);
        if let Some((before, mapped)) = stale.map(|(region, mapped)| (*region, *mapped)) {
            kept.mapped.remove(&before);
            container.unmap(mapped).map_err(|why| why.to_string())?;
        }
        let len_bytes = self.shared.regions.len_bytes(region);
        let first = Segment { region, offset: 0, len_bytes: 1 };
        let mapped = container.map(first, iova, len_bytes).map_err(|why| why.to_string())?;
        kept.mapped.insert(region, mapped);
        Ok(())
    }

    fn hide(&self, region: RegionId) {
        if let Some(mapped) = self.lock().mapped.remove(&region) {
            // What is not mapped is not reached.
            let _ = self.shared.function.container().unmap(mapped);
        }
    }

    /// It is kept from being master of the bus; one that is not there any more reaches nothing.
    fn cut_off(&self) -> bool {
        let function = &self.shared.function;
        function.let_reach(false).is_ok() || !function.is_there()
    }

    fn reconnect(&self) {
        if self.shared.function.let_reach(true).is_err() {
            self.lose("its configuration cannot be written any more");
        }
    }

    fn vectors(&self) -> u32 {
        self.shared.vectors
    }

    fn vector(&self, number: u16) -> Result<(Box<dyn Vector + Send>, EventVectors), String> {
        let vector = FunctionVector::new(&self.shared.function, number)?;
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
