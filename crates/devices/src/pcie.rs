//! SSDs on the PCI bus through Linux VFIO, named `pcie:0000:5e:00.0`.
//!
//! ```text
//!   AttachedController ─▶ PcieBus ── tenmil_pci::Function: BAR 0, interrupt vectors, reset
//!                            ├ rings and data: memory mapped through the IOMMU
//!                            └ doorbells: words of BAR 0
//! ```
//!
//! Without an IOMMU, which the user must accept explicitly, all such memory is physically
//! contiguous, since addresses are not translated: see [`RegionTable::make_allocations_contiguous`].

mod bus;
mod kind;
mod pcie_uri;
mod registers;
mod vector;

use tenmil_block::uri::Uri;
use tenmil_dma::RegionTable;
use tenmil_linux::{Clock, StepTimer, StepTiming};
use tenmil_pci::IommuMode;

use self::bus::PcieBus;
pub use self::kind::PcieKind;
pub use self::pcie_uri::PcieUri;
use crate::attached_controller::{self, AttachedController};
use crate::identify::AdminAccessFn;
use tenmil_base::Error;

/// Opens the function through VFIO and initializes the controller.
fn attach(
    name: &PcieUri,
    regions: &RegionTable,
    steps: &mut StepTimer,
) -> Result<AttachedController<PcieBus>, Error> {
    let bus = PcieBus::open(name, regions, steps)?;
    AttachedController::attach(&bus, &name.wanted, regions, steps)
}

/// Whether the device is, or is stacked on, an SSD without an IOMMU.
pub fn lacks_iommu(uri: &Uri) -> bool {
    let is_one = |name: PcieUri| name.isolation == IommuMode::None;
    let itself = uri.scheme() == PcieUri::SCHEME && PcieUri::from_uri(uri).is_ok_and(is_one);
    itself || uri.children().iter().any(lacks_iommu)
}

/// Empty region table for data that is transferred to and from these devices.
pub fn regions_for<'a>(uris: impl IntoIterator<Item = &'a Uri>, most: usize) -> RegionTable {
    let regions = RegionTable::new(most);
    if uris.into_iter().any(lacks_iommu) {
        // The table is empty, so no region can be discontiguous.
        regions.make_allocations_contiguous();
    }
    regions
}

/// Runs `ask` with admin access to the controller that `name` names.
pub fn with_controller(name: &PcieUri, ask: AdminAccessFn<'_>) -> Result<(), Error> {
    let mut steps = StepTimer::begin(Clock::start());
    attached_controller::with_controller(attach(name, &RegionTable::new(8), &mut steps)?, ask)
}

/// Initializes the controller and reads its first block. Returns the duration of each step.
pub fn time_first_read(name: &PcieUri) -> Result<Vec<StepTiming>, Error> {
    let (mut steps, regions) = (StepTimer::begin(Clock::start()), RegionTable::new(8));
    attach(name, &regions, &mut steps)?.read_first(&regions, &mut steps)?;
    Ok(steps.timings())
}

#[cfg(test)]
mod tests {
    use tenmil_block::uri::Uri;

    use tenmil_dma::RegionTable;
    use tenmil_linux::{Clock, StepTimer};

    use super::{PcieBus, PcieUri, lacks_iommu, regions_for};

    #[test]
    fn memory_is_contiguous_for_an_ssd_without_an_iommu_at_any_depth_of_the_uri() {
        let lone = "pcie:5e:00.0?unsafe-no-iommu=yes";
        let uri = |text: &str| text.parse::<Uri>().unwrap();
        let below = format!("mirror:[file:/a],[split:[{lone}]/1]");
        for (text, expected) in [
            (lone, true),
            (below.as_str(), true),
            ("pcie:5e:00.0", false),
            ("pcie:5e:00.0?unsafe-no-iommu=no", false),
            ("file:/a?unsafe-no-iommu=yes", false),
        ] {
            assert_eq!(lacks_iommu(&uri(text)), expected, "{text}");
            let among = [uri("ram:1m"), uri(text)];
            assert_eq!(regions_for(&among, 4).allocates_contiguous(), expected, "{text}");
        }
    }

    #[test]
    fn memory_allocated_before_is_rejected_with_a_hint() {
        let uri = "pcie:5e:00.0?unsafe-no-iommu=yes".parse().unwrap();
        let (name, regions) = (PcieUri::from_uri(&uri).unwrap(), RegionTable::new(2));
        let _ram = regions.allocate_region(4096).unwrap();
        let mut steps = StepTimer::begin(Clock::on_kernel_clock());
        let refused = PcieBus::open(&name, &regions, &mut steps).err().unwrap();
        assert!(
            refused.text.contains("unsafe-no-iommu: memory that is not contiguous was allocated"),
            "{refused:?}"
        );
        assert!(refused.hint.unwrap().contains("Name it on the command line"));
        let refused = PcieBus::open(&name, &RegionTable::new(2), &mut steps).err().unwrap();
        assert!(refused.text.contains("no PCI function is there"), "{refused:?}");
    }
}
