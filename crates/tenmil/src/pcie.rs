//! SSDs on the PCI bus, by Linux's VFIO: `pcie:0000:5e:00.0` names one.
//!
//! ```text
//!   Attached ─▶ PcieBus ── vfio::Function: BAR 0, vectors, reset
//!                  ├ rings and data: memory that the IOMMU maps for it
//!                  └ doorbells: words of BAR 0
//! ```
//!
//! Where there is no IOMMU, and whoever calls says that he knows, such memory lies in a row in the
//! machine, since nothing translates addresses: see [`Regions::lay_rows`].

mod bus;
mod kind;
mod name;
mod registers;
mod vector;

use block::uri::Uri;
use dma::Regions;
use host::{Clock, Steps, Took};
use vfio::Isolation;

use self::bus::PcieBus;
pub use self::kind::Kind;
pub use self::name::PcieName;
use crate::Refused;
use crate::attached::{self, Attached};
use crate::identify::Ask;

/// Takes the function from VFIO, and brings it up.
fn attach(
    name: &PcieName,
    regions: &Regions,
    steps: &mut Steps,
) -> Result<Attached<PcieBus>, Refused> {
    let bus = PcieBus::open(name, regions, steps)?;
    Attached::call(&bus, &name.wanted, regions, steps)
}

/// Whether it is, or stands on, an SSD that no IOMMU keeps from any memory.
pub(crate) fn lacks_iommu(uri: &Uri) -> bool {
    let is_one = |name: PcieName| name.isolation == Isolation::None;
    let itself = uri.scheme() == PcieName::SCHEME && PcieName::of(uri).is_ok_and(is_one);
    itself || uri.children().iter().any(lacks_iommu)
}

/// An empty table of regions for what will be moved to and from these devices.
pub(crate) fn regions_for<'a>(uris: impl IntoIterator<Item = &'a Uri>, most: usize) -> Regions {
    let regions = Regions::new(most);
    if uris.into_iter().any(lacks_iommu) {
        // There is nothing in it that could lie elsewhere.
        regions.lay_rows();
    }
    regions
}

/// Lets `ask` ask the controller that `name` names.
pub(crate) fn with_controller(name: &PcieName, ask: Ask<'_>) -> Result<(), Refused> {
    let mut steps = Steps::begin(Clock::start());
    attached::with_controller(attach(name, &Regions::new(8), &mut steps)?, ask)
}

/// Brings the controller up and reads its first block: how long each step took.
pub(crate) fn try_out(name: &PcieName) -> Result<Vec<Took>, Refused> {
    let (mut steps, regions) = (Steps::begin(Clock::start()), Regions::new(8));
    attach(name, &regions, &mut steps)?.read_first(&regions, &mut steps)?;
    Ok(steps.took())
}

#[cfg(test)]
mod tests {
    use block::uri::Uri;

    use dma::Regions;
    use host::{Clock, Steps};

    use super::{PcieBus, PcieName, lacks_iommu, regions_for};

    #[test]
    fn memory_lies_in_rows_for_an_ssd_without_an_iommu_wherever_it_stands() {
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
            assert_eq!(regions_for(&among, 4).is_in_rows(), expected, "{text}");
        }
    }

    #[test]
    fn memory_that_was_handed_out_before_is_refused_with_the_remedy() {
        let uri = "pcie:5e:00.0?unsafe-no-iommu=yes".parse().unwrap();
        let (name, regions) = (PcieName::of(&uri).unwrap(), Regions::new(2));
        let _ram = regions.allocate(4096).unwrap();
        let mut steps = Steps::begin(Clock::kernel());
        let refused = PcieBus::open(&name, &regions, &mut steps).err().unwrap();
        assert!(refused.text.contains("unsafe-no-iommu: memory was handed out"), "{refused:?}");
        assert!(refused.hint.unwrap().contains("Name it on the command line"));
        let refused = PcieBus::open(&name, &Regions::new(2), &mut steps).err().unwrap();
        assert!(refused.text.contains("no PCI function is there"), "{refused:?}");
    }
}
