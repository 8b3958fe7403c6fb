//! PCIe access to a controller.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{BarMapError, BarRange, ErrorCategory, InterruptVector, RegionId, Segment};
use tenmil_dma::{DeviceKind, Region, RegionError, RegionTable};
use tenmil_linux::{EventFdVectors, StepTimer};
use tenmil_pci::{AttachError, IommuMode, KernelFilesRoot, MappedBar, VfioFunction, VfioInterface};

use super::pcie_uri::PcieUri;
use super::registers::{BarDoorbell, Registers};
use super::vector::PciInterruptVector;
use crate::attached_controller::ControllerBus;
use tenmil_base::Error;

/// A PCI function opened through VFIO.
#[derive(Clone)]
pub(super) struct PcieBus {
    shared: Arc<BusState>,
}

struct BusState {
    bar: MappedBar,
    name: String,
    isolation: IommuMode,
    interface: VfioInterface,
    /// Number of interrupt vectors that can signal an event descriptor.
    vectors: u32,
    /// Event descriptors for a device request of the kernel and for a bus error.
    alarms: EventFdVectors,
    state: Mutex<FunctionState>,
}

struct FunctionState {
    /// None once the function has been returned to the kernel.
    function: Option<Arc<VfioFunction>>,
    /// Mapped regions and their IOVAs.
    shown: BTreeMap<RegionId, u64>,
    /// BAR with controller memory, once it has been mapped.
    memory: Option<MappedBar>,
    lost: Option<String>,
    /// Revoking DMA access failed and no IOMMU enforces it, so regions that were mapped can never
    /// be reused.
    is_at_large: bool,
}

/// Indices of `alarms`.
const DEVICE_REQUEST: u16 = 0;
const BUS_ERROR: u16 = 1;
/// Hint for memory that an SSD without an IOMMU cannot address.
const NAMED_FIRST: &str = "Name it on the command line of a command, before devices that hold memory; \
                           programs and changed files of `serve` cannot add one.";

impl PcieBus {
    pub(super) fn open(
        name: &PcieUri,
        regions: &RegionTable,
        steps: &mut StepTimer,
    ) -> Result<Self, Error> {
        if name.isolation == IommuMode::None && !regions.make_allocations_contiguous() {
            return Err(Error::usage(format!(
                "attach {}: unsafe-no-iommu: memory that is not contiguous was allocated \
                 before, expected none",
                name.address
            ))
            .with_hint(NAMED_FIRST));
        }
        let function = VfioFunction::open_controller(
            &KernelFilesRoot::default(),
            &name.address,
            name.isolation,
            regions,
        );
        let function = function.map_err(|why| attach_error(&why))?;
        steps.finish_step("take it from VFIO");
        function.reset_and_enable().map_err(|why| attach_error(&why))?;
        steps.finish_step("reset it");
        if let Some(why) = function.iommufd_unused_reason() {
            tracing::info!("{}:{}: through its group: {why}", PcieUri::SCHEME, name.address);
        }
        let environment_error = |what: &str, error: std::io::Error| {
            Error::environment(format!("attach {}: {what}: {error}", name.address))
        };
        let bar =
            function.map_bar0(regions).map_err(|error| environment_error("map BAR 0", error))?;
        let vectors = function.msix_vector_count().min(u32::from(name.wanted.queues) + 1);
        let has_vectors = vectors > 1 && function.enable_vectors(vectors).is_ok();
        let alarms =
            EventFdVectors::new(2).map_err(|error| environment_error("make an event", error))?;
        // If the kernel supports neither event, removal is detected by registers that read as ones.
        if let Some(event) = alarms.descriptor(DEVICE_REQUEST) {
            let _ = function.set_device_request_eventfd(event);
        }
        if let Some(event) = alarms.descriptor(BUS_ERROR) {
            let _ = function.set_error_eventfd(event);
        }
        steps.finish_step("map its registers, and have its vectors signal");
        let interface = function.interface();
        let function = Some(Arc::new(function));
        let shown = BTreeMap::new();
        let state = FunctionState { function, shown, memory: None, lost: None, is_at_large: false };
        let shared = BusState {
            bar,
            name: format!("{}:{}", PcieUri::SCHEME, name.address),
            isolation: name.isolation,
            interface,
            vectors: if has_vectors { vectors } else { 0 },
            alarms,
            state: Mutex::new(state),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    fn lock(&self) -> MutexGuard<'_, FunctionState> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ControllerBus for PcieBus {
    type Registers = Registers;
    type Doorbell = BarDoorbell;

    const KIND: DeviceKind = DeviceKind::Pcie;

    fn name(&self) -> &str {
        &self.shared.name
    }

    fn describe(&self) -> &'static str {
        match (self.shared.isolation, self.shared.interface) {
            (IommuMode::Iommu { .. }, VfioInterface::Iommufd) => {
                "an SSD on the PCI bus, over VFIO and iommufd"
            }
            (IommuMode::Iommu { .. }, VfioInterface::Group) => {
                "an SSD on the PCI bus, over a group of VFIO"
            }
            (IommuMode::None, _) => {
                "an SSD on the PCI bus, over VFIO, which no IOMMU keeps from any memory"
            }
        }
    }

    fn registers(&self) -> Registers {
        Registers::new(self.shared.bar.clone())
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.alarms.descriptor(DEVICE_REQUEST).expect("it was made with two")
    }

    fn process_messages(&self) {
        let shared = &self.shared;
        if shared.alarms.clear_signals(DEVICE_REQUEST) {
            self.mark_lost("the kernel requests it back: it is being removed or unbound");
        }
        if shared.alarms.clear_signals(BUS_ERROR) {
            self.mark_lost("the PCI bus reports an error of it");
        }
        let memory_has_failed =
            self.lock().memory.as_ref().is_some_and(MappedBar::has_access_failed);
        if shared.bar.has_access_failed() || memory_has_failed {
            self.mark_lost("its registers do not respond: it was pulled or lost its power");
        }
    }

    fn lost_reason(&self) -> Option<String> {
        self.lock().lost.clone()
    }

    fn mark_lost(&self, why: &str) {
        self.lock().lost.get_or_insert_with(|| why.to_owned());
    }

    fn allocate(&self, regions: &RegionTable, len_bytes: usize) -> Result<Region, RegionError> {
        match self.shared.isolation {
            IommuMode::Iommu { .. } => regions.allocate_shared(len_bytes),
            IommuMode::None => regions.allocate_region(len_bytes),
        }
    }

    fn map(&self, region: RegionId) -> Result<u64, Error> {
        let mut state = self.lock();
        if let Some(iova) = state.shown.get(&region) {
            return Ok(*iova);
        }
        let gone = || Error::remote("the kernel has it back");
        let shown = state.function.as_ref().ok_or_else(gone)?.iommu_context().map_region(region);
        let iova = shown.map_err(|why| {
            let hint = why.hint();
            Error { hint, ..Error::environment(why) }
        })?;
        state.shown.insert(region, iova);
        Ok(iova)
    }

    fn unmap(&self, region: RegionId) -> bool {
        let mut state = self.lock();
        if state.is_at_large && state.shown.contains_key(&region) {
            return false;
        }
        let Some(function) = state.function.as_ref().filter(|_| state.shown.contains_key(&region))
        else {
            return true;
        };
        let is_gone = function.iommu_context().unmap_region(region).is_ok();
        if is_gone {
            state.shown.remove(&region);
        }
        is_gone
    }

    /// Clears Bus Master Enable. A function that has been removed accesses nothing. If the function
    /// is marked lost, it is returned to the kernel.
    fn revoke_dma_access(&self) -> bool {
        let mut state = self.lock();
        let Some(function) = state.function.clone() else { return true };
        let is_cut = function.set_bus_master(false).is_ok() || !function.is_present();
        state.is_at_large = !is_cut && self.shared.isolation == IommuMode::None;
        if is_cut && state.lost.is_some() {
            for region in std::mem::take(&mut state.shown).into_keys() {
                // A region that the kernel does not unmap now is unmapped when the container is
                // closed.
                let _ = function.iommu_context().unmap_region(region);
            }
            // The mapping of a BAR holds the function open as well.
            self.shared.bar.unmap();
            state.memory.iter().for_each(MappedBar::unmap);
            state.function = None;
        }
        is_cut
    }

    fn restore_dma_access(&self) {
        let function = self.lock().function.clone();
        if function.is_none_or(|function| function.set_bus_master(true).is_err()) {
            self.mark_lost("its configuration cannot be written any more");
        }
    }

    fn device_memory(&self, part: BarRange) -> Result<(Segment, u64), BarMapError> {
        let gone = BarMapError::Unusable { reason: "the kernel has it back" };
        let function = self.lock().function.clone().ok_or(gone)?;
        // The lock must not be held here: a region that fails to be mapped is unmapped in this
        // call, which takes the lock.
        let (memory, address) = function.map_bar_memory(part, self.shared.bar.regions())?;
        let segment = memory.segment();
        self.lock().memory = Some(memory);
        Ok((segment, address))
    }

    fn interrupt_vector_count(&self) -> u32 {
        self.shared.vectors
    }

    fn vector(
        &self,
        number: u16,
    ) -> Result<(Box<dyn InterruptVector + Send>, EventFdVectors), Error> {
        let function = self
            .lock()
            .function
            .clone()
            .ok_or("the kernel has it back")
            .map_err(Error::environment)?;
        let vector = PciInterruptVector::new(&function, number)?;
        let event = vector.event();
        Ok((Box::new(vector), event))
    }
}

fn attach_error(why: &AttachError) -> Error {
    let category = match why {
        AttachError::NotFound { .. } | AttachError::Driver { .. } | AttachError::Class { .. } => {
            ErrorCategory::Usage
        }
        _ => ErrorCategory::Environment,
    };
    Error { hint: why.hint(), ..Error::new(category, why.to_string()) }
}
