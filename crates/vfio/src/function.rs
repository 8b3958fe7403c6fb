//! A function, from its address to the moment that it is given back.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base::{BarPart, NoDeviceMemory, Segment};
use dma::{Adopted, FilePart, Regions};

use crate::call::{self, Argument, DeviceInfo, IrqInfo, RegionInfo};
use crate::configuration::{COMMAND, Configuration};
use crate::container::Container;
use crate::error::NotAttached;
use crate::group::Joined;
use crate::opening::{Opening, Taken};

/// Where the kernel tells of functions and hands them out: `/` unless a test made its own.
#[derive(Clone, Debug)]
pub struct Place {
    root: PathBuf,
}

/// What keeps a function from memory that it was not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isolation {
    /// The IOMMU, used in this way; without a word by iommufd where the kernel has it and this process
    /// may use it.
    Iommu {
        /// In which.
        by: Option<Way>,
    },
    /// Nothing does: it reaches all memory of the machine, and finds it where it lies there.
    None,
}

/// How a function and its IOMMU are taken from VFIO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By the door of its group, with a container of type 1.
    Group,
    /// By its own door, with an address space of iommufd.
    Iommufd,
}

/// A function that this process has.
#[derive(Debug)]
pub struct Function {
    address: String,
    device: File,
    /// Kept as long as the device: without it the kernel takes the IOMMU away.
    group: Joined,
    instead: Option<String>,
    can_reset: bool,
    vectors: u32,
    configuration_at: u64,
}

/// A mapped BAR, or a part of one. Cheap to clone; it stays mapped as long as a handle is there.
#[derive(Clone, Debug)]
pub struct Bar {
    regions: Regions,
    memory: Arc<Adopted>,
}

/// Which part of a function, for calls that want one (`VFIO_PCI_*_REGION_INDEX`).
mod region {
    pub(super) const BAR0: u32 = 0;
    pub(super) const CONFIGURATION: u32 = 7;
}

/// Which interrupts (`VFIO_PCI_*_IRQ_INDEX`).
mod irq {
    pub(super) const MSIX: u32 = 2;
    pub(super) const ERROR: u32 = 3;
    pub(super) const REQUEST: u32 = 4;
}

/// An NVM Express I/O controller (PCI Code and ID Assignment 1.11 §1.1).
const NVM_EXPRESS: u32 = 0x01_0802;
const PAGE: u64 = 4096;
/// As much of a BAR's memory is mapped: rings of 1024 queues with the most entries that a queue has
/// here, which is 4096 of 64 bytes.
const MEMORY_MAX: u64 = 256 << 20;

impl Default for Place {
    fn default() -> Self {
        Self { root: PathBuf::from("/") }
    }
}

impl Place {
    /// Where a test has put what the kernel would tell.
    pub fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The group of a function that VFIO drives, which is isolated so.
    ///
    /// # Errors
    ///
    /// If there is no such function, or something else drives it, or there is no IOMMU, or there is
    /// one although none was expected.
    pub fn group(&self, address: &str, isolation: Isolation) -> Result<u32, NotAttached> {
        let of = || address.to_owned();
        let function = self.root.join("sys/bus/pci/devices").join(address);
        if !function.exists() {
            return Err(NotAttached::Absent { address: of() });
        }
        let name_of = |link: &str| {
            let target = std::fs::read_link(function.join(link)).ok()?;
            Some(target.file_name()?.to_string_lossy().into_owned())
        };
        let driver = name_of("driver");
        if driver.as_deref() != Some("vfio-pci") {
            return Err(NotAttached::Driver { address: of(), found: driver });
        }
        let group = name_of("iommu_group").and_then(|name| name.parse().ok());
        let group: u32 = group.ok_or_else(|| NotAttached::NoIommu { address: of() })?;
        // VFIO makes such a group by itself for what it drives without an IOMMU.
        let path = format!("sys/kernel/iommu_groups/{group}/name");
        let name = std::fs::read_to_string(self.root.join(path)).unwrap_or_default();
        match (isolation, name.trim_end() == "vfio-noiommu") {
            (Isolation::Iommu { .. }, false) | (Isolation::None, true) => Ok(group),
            (Isolation::Iommu { .. }, true) => Err(NotAttached::NoIommu { address: of() }),
            (Isolation::None, false) => Err(NotAttached::HasIommu { address: of() }),
        }
    }
}

impl Function {
    /// Takes the NVMe controller at `address`, which is to be [started](Self::start) next. What it is
    /// given to reach will lie in `regions`; [in rows](Regions::lay_rows), if nothing but
    /// our own care keeps it from other memory.
    ///
    /// # Errors
    ///
    /// [`NotAttached`] says what stands in the way.
    pub fn open(
        place: &Place,
        address: &str,
        isolation: Isolation,
        regions: &Regions,
    ) -> Result<Self, NotAttached> {
        let number = place.group(address, isolation)?;
        let taken = Opening { place, address, number, regions }.take(isolation)?;
        let refuse = |what| {
            let address = address.to_owned();
            move |error| NotAttached::Call { address, what, error }
        };
        let function = Self::of(address, taken).map_err(refuse("ask it"))?;
        let found = function.configuration().map_err(refuse("read its configuration"))?.class();
        if found != NVM_EXPRESS {
            return Err(NotAttached::Class { address: address.to_owned(), found });
        }
        Ok(function)
    }

    /// Resets it, and has it answer. It reaches nothing until it [is let](Self::let_reach): not every
    /// one can be reset so, and whoever had it before may have left it at work.
    ///
    /// # Errors
    ///
    /// If the kernel could not.
    pub fn start(&self) -> Result<(), NotAttached> {
        let refuse =
            |what| move |error| NotAttached::Call { address: self.address.clone(), what, error };
        self.reset().map_err(refuse("reset it"))?;
        self.let_reach(false).map_err(refuse("keep it from memory"))
    }

    fn of(address: &str, Taken { device, group, instead }: Taken) -> io::Result<Self> {
        let mut about = DeviceInfo { argsz: DeviceInfo::BYTES, ..DeviceInfo::default() };
        call::with(device.as_fd(), call::DEVICE_GET_INFO, &mut about)?;
        if about.flags & call::DEVICE_IS_PCI == 0 || about.regions <= region::CONFIGURATION {
            return Err(io::Error::other("it is no PCI function"));
        }
        let configuration_at = region_of(&device, region::CONFIGURATION)?.offset;
        let mut msix = IrqInfo { argsz: IrqInfo::BYTES, index: irq::MSIX, ..IrqInfo::default() };
        call::with(device.as_fd(), call::DEVICE_GET_IRQ_INFO, &mut msix)?;
        Ok(Self {
            address: address.to_owned(),
            device,
            group,
            instead,
            can_reset: about.flags & call::DEVICE_CAN_RESET != 0,
            vectors: msix.count,
            configuration_at,
        })
    }

    /// What it is called.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// What it reaches.
    pub fn container(&self) -> &Container {
        &self.group.container
    }

    /// How it was taken.
    pub fn way(&self) -> Way {
        self.group.container.way()
    }

    /// Why it is not by iommufd, if the kernel has that and this process may not use it.
    pub fn instead(&self) -> Option<&str> {
        self.instead.as_deref()
    }

    /// How many vectors it has.
    pub fn vectors(&self) -> u32 {
        self.vectors
    }

    /// What its configuration space says now.
    ///
    /// # Errors
    ///
    /// If it is not there any more.
    pub fn configuration(&self) -> io::Result<Configuration> {
        let mut bytes = [0; 256];
        self.device.read_exact_at(&mut bytes, self.configuration_at)?;
        Ok(Configuration::new(bytes))
    }

    /// Whether it answers at all: one that was pulled reads as ones.
    pub fn is_there(&self) -> bool {
        self.configuration().is_ok_and(|found| found.identity() != (0xffff, 0xffff))
    }

    /// Resets it, if it can be reset so.
    fn reset(&self) -> io::Result<()> {
        if self.can_reset {
            call::plain(self.device.as_fd(), call::DEVICE_RESET, 0)?;
        }
        Ok(())
    }

    /// Lets it reach memory that is mapped, or none.
    ///
    /// # Errors
    ///
    /// If it is not there any more.
    pub fn let_reach(&self, may: bool) -> io::Result<()> {
        let found = self.configuration()?;
        let command = if may { found.command_on() } else { found.command_quiet() };
        self.device.write_all_at(&command.to_le_bytes(), self.configuration_at + COMMAND)
    }

    /// BAR 0, in `regions`.
    ///
    /// # Errors
    ///
    /// If the kernel does not let it be mapped.
    pub fn bar(&self, regions: &Regions) -> io::Result<Bar> {
        let found = region_of(&self.device, region::BAR0)?;
        if found.flags & call::REGION_CAN_MAP == 0 || found.size < 2 * PAGE {
            return Err(io::Error::other(format!(
                "BAR 0 of {} bytes that can{} be mapped, expected registers and doorbells",
                found.size,
                if found.flags & call::REGION_CAN_MAP == 0 { "not" } else { "" },
            )));
        }
        let part = FilePart { offset: found.offset, len_bytes: found.size };
        let memory = regions.adopt_registers(self.device.as_fd(), part);
        let memory = memory.map_err(|why| io::Error::other(why.to_string()))?;
        Ok(Bar { regions: regions.clone(), memory: Arc::new(memory) })
    }

    /// A part of any BAR in which there is memory, in `regions`, and the address at which it lies on
    /// the bus. From now on no memory of the host is shown to the function there.
    ///
    /// # Errors
    ///
    /// If the BAR has no such part, or what stands in the way of its use.
    pub fn memory(&self, part: BarPart, regions: &Regions) -> Result<(Bar, u64), NoDeviceMemory> {
        let unusable = |why| NoDeviceMemory::Unusable { why };
        let found = region_of(&self.device, region::BAR0 + u32::from(part.bar));
        let found = found.map_err(|_| NoDeviceMemory::Outside { bar_bytes: 0 })?;
        fit(part, found.size)?;
        if found.flags & call::REGION_CAN_MAP == 0 {
            return Err(unusable("the kernel does not let its BAR be mapped"));
        }
        let configuration = self.configuration();
        let configuration = configuration.map_err(|_| unusable("its BAR cannot be looked up"))?;
        let address = configuration.bar_address(part.bar);
        let address = address.and_then(|address| address.checked_add(part.offset));
        let address = address.ok_or(unusable("its BAR has no address"))?;
        if !self.container().leave_out(address, part.len_bytes) {
            return Err(unusable("the IOMMU has memory of ours at the address of its BAR"));
        }
        let len_bytes = part.len_bytes.min(MEMORY_MAX);
        let mapped = FilePart { offset: found.offset + part.offset, len_bytes };
        let memory = regions.adopt_registers(self.device.as_fd(), mapped);
        let memory = memory.map_err(|_| unusable("its BAR cannot be mapped"))?;
        Ok((Bar { regions: regions.clone(), memory: Arc::new(memory) }, address))
    }

    /// Makes the first `count` vectors there are ready; none of them signals anybody yet. Not every
    /// kernel makes more later.
    ///
    /// # Errors
    ///
    /// If there are fewer, or no interrupts are left.
    pub fn prepare_vectors(&self, count: u32) -> io::Result<()> {
        call::set_irqs(self.device.as_fd(), irq::MSIX, 0, &vec![None; count as usize])
    }

    /// Has vector `number`, which is ready, signal `event`, or nobody.
    ///
    /// # Errors
    ///
    /// If it is not ready.
    pub fn signal(&self, number: u32, event: Option<BorrowedFd<'_>>) -> io::Result<()> {
        call::set_irqs(self.device.as_fd(), irq::MSIX, number, &[event])
    }

    /// Has the kernel signal `event` when it wants the function back.
    ///
    /// # Errors
    ///
    /// If the kernel does not tell that.
    pub fn signal_request(&self, event: BorrowedFd<'_>) -> io::Result<()> {
        call::set_irqs(self.device.as_fd(), irq::REQUEST, 0, &[Some(event)])
    }

    /// Has the kernel signal `event` when the bus reports an error of the function.
    ///
    /// # Errors
    ///
    /// If the function reports none.
    pub fn signal_error(&self, event: BorrowedFd<'_>) -> io::Result<()> {
        call::set_irqs(self.device.as_fd(), irq::ERROR, 0, &[Some(event)])
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        // One that is not there any more reaches nothing, and the kernel resets what is given back.
        _ = self.let_reach(false);
        _ = call::set_irqs(self.device.as_fd(), irq::MSIX, 0, &[]);
    }
}

impl Bar {
    /// How long it is.
    pub fn len_bytes(&self) -> u64 {
        self.memory.len_bytes()
    }

    /// Gives it back, whoever still has a handle: what is read there from now on means nothing, what
    /// is written goes nowhere.
    pub fn let_go(&self) {
        self.memory.let_go();
    }

    /// Whether it was taken or given away.
    pub fn has_failed(&self) -> bool {
        self.memory.has_failed()
    }

    /// The table that it lies in.
    pub fn regions(&self) -> &Regions {
        &self.regions
    }

    /// All of it, or as much as a segment can name.
    pub fn segment(&self) -> Segment {
        let len_bytes = u32::try_from(self.len_bytes()).unwrap_or(u32::MAX);
        Segment { region: self.memory.id(), offset: self.memory.offset(), len_bytes }
    }

    /// Four bytes of it, if they lie inside.
    pub fn word(&self, offset: u32) -> Option<Segment> {
        let offset = u64::from(offset);
        let is_inside = offset.is_multiple_of(4) && offset + 4 <= self.len_bytes();
        is_inside.then(|| Segment { region: self.memory.id(), offset, len_bytes: 4 })
    }
}

/// Whether `part` lies in its BAR, which is so long.
fn fit(part: BarPart, bar_bytes: u64) -> Result<(), NoDeviceMemory> {
    let end = part.offset.checked_add(part.len_bytes);
    match end {
        Some(end) if end <= bar_bytes => Ok(()),
        _ => Err(NoDeviceMemory::Outside { bar_bytes }),
    }
}

fn region_of(device: &File, index: u32) -> io::Result<RegionInfo> {
    let mut about = RegionInfo { argsz: RegionInfo::BYTES, index, ..RegionInfo::default() };
    call::with(device.as_fd(), call::DEVICE_GET_REGION_INFO, &mut about)?;
    Ok(about)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::io::Write;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use dma::Regions;

    use base::{BarPart, NoDeviceMemory};

    use super::{Function, Isolation, Place, Way, fit};
    use crate::NotAttached;

    const AT: &str = "0000:5e:00.0";
    const ANY: Isolation = Isolation::Iommu { by: None };

    /// A function as the kernel tells of it.
    fn tree(driver: Option<&str>, group: Option<u32>) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let function = root.path().join("sys/bus/pci/devices").join(AT);
        fs::create_dir_all(&function).unwrap();
        if let Some(driver) = driver {
            symlink(Path::new("../drivers").join(driver), function.join("driver")).unwrap();
        }
        if let Some(group) = group {
            let target = Path::new("/sys/kernel/iommu_groups").join(group.to_string());
            symlink(target, function.join("iommu_group")).unwrap();
        }
        root
    }

    #[test]
    fn a_part_that_ends_behind_its_bar_is_none_of_it() {
        let outside = Err(NoDeviceMemory::Outside { bar_bytes: 0x4000 });
        for (offset, len_bytes, expected) in [
            (0, 0x4000, Ok(())),
            (0x3000, 0x1000, Ok(())),
            (0x3000, 0x1001, outside),
            (0x4000, 1, outside),
            (u64::MAX, 2, outside),
        ] {
            let part = BarPart { bar: 2, offset, len_bytes };
            assert_eq!(fit(part, 0x4000), expected, "{part:?}");
        }
    }

    fn refusal(root: &Path, address: &str) -> NotAttached {
        Function::open(&Place::at(root), address, ANY, &Regions::new(4)).unwrap_err()
    }

    #[test]
    fn whatever_stands_in_the_way_is_named_with_what_mends_it() {
        let bound = tree(Some("vfio-pci"), Some(12));
        let group = Place::at(bound.path()).group(AT, ANY);
        assert_eq!(group.unwrap(), 12);
        let without = refusal(bound.path(), AT);
        assert!(without.to_string().contains("dev/vfio/vfio: "), "{without}");

        let absent = refusal(bound.path(), "0000:5e:00.1");
        assert_eq!(absent.to_string(), "attach 0000:5e:00.1: no PCI function is there");
        assert!(absent.hint().unwrap().contains("tenmil list"));

        let kernel = refusal(tree(Some("nvme"), Some(12)).path(), AT);
        let text = "attach 0000:5e:00.0: driver is 'nvme', expected 'vfio-pci'";
        assert_eq!(kernel.to_string(), text);
        assert!(kernel.hint().unwrap().contains("tenmil bind 0000:5e:00.0"));

        let none = refusal(tree(None, Some(12)).path(), AT);
        assert!(none.to_string().contains("driver is none"), "{none}");

        let off = refusal(tree(Some("vfio-pci"), None).path(), AT);
        assert!(off.to_string().contains("in no IOMMU group"), "{off}");
        assert!(off.hint().unwrap().contains("tenmil doctor"));

        let unsafely = unsafely();
        let off = refusal(unsafely.path(), AT);
        assert!(off.to_string().contains("in no IOMMU group"), "{off}");
        assert!(off.hint().unwrap().contains("unsafe-no-iommu=yes"));
    }

    #[test]
    fn without_an_iommu_is_for_whoever_has_none_and_says_so() {
        let open = |root: &Path| {
            let (place, regions) = (Place::at(root), Regions::new(4));
            Function::open(&place, AT, Isolation::None, &regions).unwrap_err()
        };
        let has_one = open(tree(Some("vfio-pci"), Some(12)).path());
        assert!(has_one.to_string().contains("behind an IOMMU, expected none"), "{has_one}");
        assert!(has_one.hint().unwrap().contains("unsafe-no-iommu"));

        let bound = unsafely();
        assert_eq!(Place::at(bound.path()).group(AT, Isolation::None).unwrap(), 7);
        let without = open(bound.path());
        assert!(without.to_string().contains("dev/vfio/vfio: "), "{without}");
        let none = open(tree(Some("vfio-pci"), None).path());
        assert!(none.hint().unwrap().contains("--unsafe-no-iommu"), "{none}");
    }

    #[test]
    fn iommufd_is_taken_where_there_is_a_door_and_an_address_space_and_by_name_only_there() {
        let bound = tree(Some("vfio-pci"), Some(12));
        let (root, regions) = (bound.path(), Regions::new(4));
        let open = |by| {
            let place = Place::at(root);
            Function::open(&place, AT, Isolation::Iommu { by }, &regions).unwrap_err()
        };
        let make = |path: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            OpenOptions::new().create_new(true).write(true).open(path).unwrap();
        };
        let none = open(Some(Way::Iommufd));
        assert!(none.to_string().contains("no door in /dev/vfio/devices"), "{none}");
        assert!(none.hint().unwrap().contains("CONFIG_VFIO_DEVICE_CDEV"));

        // A name without a door is what kernels without iommufd show.
        fs::create_dir_all(root.join("sys/bus/pci/devices").join(AT).join("vfio-dev/vfio3"))
            .unwrap();
        make("dev/iommu");
        assert!(open(None).to_string().contains("dev/vfio/vfio: "), "through its group");
        make("dev/vfio/devices/vfio3");
        let taken = open(None).to_string();
        assert!(taken.contains("make an address space"), "{taken}");
        assert!(open(Some(Way::Group)).to_string().contains("dev/vfio/vfio: "));
        fs::remove_file(root.join("dev/iommu")).unwrap();
        assert!(open(None).to_string().contains("dev/vfio/vfio: "), "nothing to reach memory by");
        assert!(open(Some(Way::Iommufd)).to_string().contains("dev/iommu: "));
    }

    /// What VFIO makes of a function that is behind no IOMMU.
    fn unsafely() -> tempfile::TempDir {
        let root = tree(Some("vfio-pci"), Some(7));
        let group = root.path().join("sys/kernel/iommu_groups/7");
        fs::create_dir_all(&group).unwrap();
        let mut name = OpenOptions::new();
        let mut name = name.create_new(true).write(true).open(group.join("name")).unwrap();
        name.write_all(b"vfio-noiommu\n").unwrap();
        root
    }
}
