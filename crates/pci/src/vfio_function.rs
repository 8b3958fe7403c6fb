//! PCI function under VFIO, from opening to release.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tenmil_base::{BarMapError, BarRange, Segment};
use tenmil_dma::{FileRange, ForeignRegion, RegionTable};

use crate::config_space::{COMMAND, PciConfigSpace};
use crate::error::AttachError;
use crate::group::GroupMember;
use crate::iommu_context::IommuContext;
use crate::open_function::{OpenRequest, OpenedFunction};
use crate::vfio_ioctl::{self, DeviceInfo, IoctlArgument, IrqInfo, RegionInfo};

/// Root of `/dev` and `/sys`: `/`, or a directory made by a test.
#[derive(Clone, Debug)]
pub struct KernelFilesRoot {
    root: PathBuf,
}

/// Memory isolation of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IommuMode {
    /// By the IOMMU, through the given interface; by default iommufd where the kernel supports it
    /// and this process may use it.
    Iommu {
        /// Kernel interface.
        by: Option<VfioInterface>,
    },
    /// None: the function can access all memory at physical addresses.
    None,
}

/// Kernel interface for a function and its IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VfioInterface {
    /// VFIO group, with a type 1 container.
    Group,
    /// Device node with an iommufd address space.
    Iommufd,
}

/// Function opened by this process.
#[derive(Debug)]
pub struct VfioFunction {
    address: String,
    device: File,
    /// Kept as long as the device: without the group the kernel removes the IOMMU mappings.
    group: GroupMember,
    instead: Option<String>,
    can_reset: bool,
    vectors: u32,
    configuration_at: u64,
}

/// Mapped BAR, or a part of one. Cheap to clone; mapped as long as a handle exists.
#[derive(Clone, Debug)]
pub struct MappedBar {
    regions: RegionTable,
    memory: Arc<ForeignRegion>,
}

/// Region indexes (`VFIO_PCI_*_REGION_INDEX`).
mod region {
    pub(super) const BAR0: u32 = 0;
    pub(super) const CONFIGURATION: u32 = 7;
}

/// Interrupt indexes (`VFIO_PCI_*_IRQ_INDEX`).
mod irq {
    pub(super) const MSIX: u32 = 2;
    pub(super) const ERROR: u32 = 3;
    pub(super) const REQUEST: u32 = 4;
}

/// NVM Express I/O controller (PCI Code and ID Assignment 1.11 §1.1).
const NVM_EXPRESS: u32 = 0x01_0802;
const PAGE: u64 = 4096;
/// Maximum mapped length of BAR memory: rings of 1024 queues with the maximum supported depth here,
/// 4096 entries of 64 bytes.
const MEMORY_MAX: u64 = 256 << 20;

impl Default for KernelFilesRoot {
    fn default() -> Self {
        Self { root: PathBuf::from("/") }
    }
}

impl KernelFilesRoot {
    /// Uses a directory made by a test.
    pub fn in_directory(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    pub(crate) fn root_path(&self) -> &Path {
        &self.root
    }

    /// IOMMU group of a function bound to vfio-pci, with the expected isolation.
    ///
    /// # Errors
    ///
    /// If there is no such function, another driver is bound, or the presence of an IOMMU is not as
    /// expected.
    pub fn group_of_function(
        &self,
        address: &str,
        isolation: IommuMode,
    ) -> Result<u32, AttachError> {
        let of = || address.to_owned();
        let function = self.root.join("sys/bus/pci/devices").join(address);
        if !function.exists() {
            return Err(AttachError::NotFound { address: of() });
        }
        let name_of = |link: &str| {
            let target = std::fs::read_link(function.join(link)).ok()?;
            Some(target.file_name()?.to_string_lossy().into_owned())
        };
        let driver = name_of("driver");
        if driver.as_deref() != Some("vfio-pci") {
            return Err(AttachError::Driver { address: of(), found: driver });
        }
        let group = name_of("iommu_group").and_then(|name| name.parse().ok());
        let group: u32 = group.ok_or_else(|| AttachError::NoIommu { address: of() })?;
        // In no-IOMMU mode VFIO creates a group itself.
        let path = format!("sys/kernel/iommu_groups/{group}/name");
        let name = std::fs::read_to_string(self.root.join(path)).unwrap_or_default();
        match (isolation, name.trim_end() == "vfio-noiommu") {
            (IommuMode::Iommu { .. }, false) | (IommuMode::None, true) => Ok(group),
            (IommuMode::Iommu { .. }, true) => Err(AttachError::NoIommu { address: of() }),
            (IommuMode::None, false) => Err(AttachError::HasIommu { address: of() }),
        }
    }
}

impl VfioFunction {
    /// Opens the NVMe controller at `address`, which is to be [started](Self::reset_and_enable) next. Its DMA
    /// memory belongs to `regions`; [physically contiguous](RegionTable::make_allocations_contiguous), if there is no
    /// IOMMU.
    ///
    /// # Errors
    ///
    /// [`AttachError`] names the cause.
    pub fn open_controller(
        place: &KernelFilesRoot,
        address: &str,
        isolation: IommuMode,
        regions: &RegionTable,
    ) -> Result<Self, AttachError> {
        let number = place.group_of_function(address, isolation)?;
        let taken = OpenRequest { place, address, number, regions }.open_function(isolation)?;
        let refuse = |what| {
            let address = address.to_owned();
            move |error| AttachError::Ioctl { address, what, error }
        };
        let function = Self::from_device_file(address, taken).map_err(refuse("ask it"))?;
        let found =
            function.read_config_space().map_err(refuse("read its configuration"))?.class_code();
        if found != NVM_EXPRESS {
            return Err(AttachError::Class { address: address.to_owned(), found });
        }
        Ok(function)
    }

    /// Resets the function and enables its memory space. DMA stays disabled until
    /// [`set_bus_master`](Self::set_bus_master): not every function can be reset, and its previous
    /// user may have left it active.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn reset_and_enable(&self) -> Result<(), AttachError> {
        let refuse =
            |what| move |error| AttachError::Ioctl { address: self.address.clone(), what, error };
        self.reset().map_err(refuse("reset it"))?;
        self.set_bus_master(false).map_err(refuse("keep it from memory"))
    }

    fn from_device_file(
        address: &str,
        OpenedFunction { device, group, iommufd_error: instead }: OpenedFunction,
    ) -> io::Result<Self> {
        let mut about = DeviceInfo { argsz: DeviceInfo::BYTES, ..DeviceInfo::default() };
        vfio_ioctl::ioctl_with(device.as_fd(), vfio_ioctl::DEVICE_GET_INFO, &mut about)?;
        if about.flags & vfio_ioctl::DEVICE_IS_PCI == 0 || about.regions <= region::CONFIGURATION {
            return Err(io::Error::other("it is no PCI function"));
        }
        let configuration_at = vfio_region_index(&device, region::CONFIGURATION)?.offset;
        let mut msix = IrqInfo { argsz: IrqInfo::BYTES, index: irq::MSIX, ..IrqInfo::default() };
        vfio_ioctl::ioctl_with(device.as_fd(), vfio_ioctl::DEVICE_GET_IRQ_INFO, &mut msix)?;
        Ok(Self {
            address: address.to_owned(),
            device,
            group,
            instead,
            can_reset: about.flags & vfio_ioctl::DEVICE_CAN_RESET != 0,
            vectors: msix.count,
            configuration_at,
        })
    }

    /// PCI address.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// IOMMU context.
    pub fn iommu_context(&self) -> &IommuContext {
        &self.group.container
    }

    /// Kernel interface in use.
    pub fn interface(&self) -> VfioInterface {
        self.group.container.interface()
    }

    /// Reason why iommufd is not used, if the kernel supports it and this process may not use it.
    pub fn iommufd_unused_reason(&self) -> Option<&str> {
        self.instead.as_deref()
    }

    /// Number of MSI-X vectors.
    pub fn msix_vector_count(&self) -> u32 {
        self.vectors
    }

    /// Reads the configuration space.
    ///
    /// # Errors
    ///
    /// If the function was removed.
    pub fn read_config_space(&self) -> io::Result<PciConfigSpace> {
        let mut bytes = [0; 256];
        self.device.read_exact_at(&mut bytes, self.configuration_at)?;
        Ok(PciConfigSpace::new(bytes))
    }

    /// Whether the function is present: a removed one reads as all ones.
    pub fn is_present(&self) -> bool {
        self.read_config_space().is_ok_and(|found| found.vendor_and_device_id() != (0xffff, 0xffff))
    }

    /// Resets the function, if supported.
    fn reset(&self) -> io::Result<()> {
        if self.can_reset {
            vfio_ioctl::ioctl(self.device.as_fd(), vfio_ioctl::DEVICE_RESET, 0)?;
        }
        Ok(())
    }

    /// Enables or disables bus mastering (DMA).
    ///
    /// # Errors
    ///
    /// If the function was removed.
    pub fn set_bus_master(&self, may: bool) -> io::Result<()> {
        let found = self.read_config_space()?;
        let command = if may {
            found.command_with_memory_and_bus_master()
        } else {
            found.command_with_memory_only()
        };
        self.device.write_all_at(&command.to_le_bytes(), self.configuration_at + COMMAND)
    }

    /// Maps BAR 0 into `regions`.
    ///
    /// # Errors
    ///
    /// If the kernel refuses the mapping.
    pub fn map_bar0(&self, regions: &RegionTable) -> io::Result<MappedBar> {
        let found = vfio_region_index(&self.device, region::BAR0)?;
        if found.flags & vfio_ioctl::REGION_CAN_MAP == 0 || found.size < 2 * PAGE {
            return Err(io::Error::other(format!(
                "BAR 0 of {} bytes that can{} be mapped, expected registers and doorbells",
                found.size,
                if found.flags & vfio_ioctl::REGION_CAN_MAP == 0 { "not" } else { "" },
            )));
        }
        let part = FileRange { offset: found.offset, len_bytes: found.size };
        let memory = regions.map_registers(self.device.as_fd(), part);
        let memory = memory.map_err(|why| io::Error::other(why.to_string()))?;
        Ok(MappedBar { regions: regions.clone(), memory: Arc::new(memory) })
    }

    /// Maps a part of a BAR that contains memory into `regions`, and returns its bus address. From
    /// now on no host memory is mapped at that address.
    ///
    /// # Errors
    ///
    /// If the BAR has no such part, or the reason why it cannot be used.
    pub fn map_bar_memory(
        &self,
        part: BarRange,
        regions: &RegionTable,
    ) -> Result<(MappedBar, u64), BarMapError> {
        let unusable = |why| BarMapError::Unusable { reason: why };
        let found = vfio_region_index(&self.device, region::BAR0 + u32::from(part.bar));
        let found = found.map_err(|_| BarMapError::OutOfRange { bar_bytes: 0 })?;
        check_bar_range(part, found.size)?;
        if found.flags & vfio_ioctl::REGION_CAN_MAP == 0 {
            return Err(unusable("the kernel does not let its BAR be mapped"));
        }
        let configuration = self.read_config_space();
        let configuration = configuration.map_err(|_| unusable("its BAR cannot be looked up"))?;
        let address = configuration.bar_address(part.bar);
        let address = address.and_then(|address| address.checked_add(part.offset));
        let address = address.ok_or(unusable("its BAR has no address"))?;
        if !self.iommu_context().exclude_iovas(address, part.len_bytes) {
            return Err(unusable("the IOMMU has memory of ours at the address of its BAR"));
        }
        let len_bytes = part.len_bytes.min(MEMORY_MAX);
        let mapped = FileRange { offset: found.offset + part.offset, len_bytes };
        let memory = regions.map_registers(self.device.as_fd(), mapped);
        let memory = memory.map_err(|_| unusable("its BAR cannot be mapped"))?;
        Ok((MappedBar { regions: regions.clone(), memory: Arc::new(memory) }, address))
    }

    /// Enables the first `count` vectors, without an eventfd. Not every kernel can add vectors
    /// later.
    ///
    /// # Errors
    ///
    /// If there are fewer, or no interrupts are left.
    pub fn enable_vectors(&self, count: u32) -> io::Result<()> {
        vfio_ioctl::set_irq_eventfds(self.device.as_fd(), irq::MSIX, 0, &vec![None; count as usize])
    }

    /// Connects vector `number`, which must be enabled, to `event`, or disconnects it.
    ///
    /// # Errors
    ///
    /// If it is not enabled.
    pub fn set_irq_eventfd(&self, number: u32, event: Option<BorrowedFd<'_>>) -> io::Result<()> {
        vfio_ioctl::set_irq_eventfds(self.device.as_fd(), irq::MSIX, number, &[event])
    }

    /// Connects the device request interrupt to `event`: the kernel signals it to get the function
    /// back.
    ///
    /// # Errors
    ///
    /// If the kernel does not support it.
    pub fn set_device_request_eventfd(&self, event: BorrowedFd<'_>) -> io::Result<()> {
        vfio_ioctl::set_irq_eventfds(self.device.as_fd(), irq::REQUEST, 0, &[Some(event)])
    }

    /// Connects the error interrupt to `event`: the kernel signals it when the bus reports an
    /// error.
    ///
    /// # Errors
    ///
    /// If the function does not report errors.
    pub fn set_error_eventfd(&self, event: BorrowedFd<'_>) -> io::Result<()> {
        vfio_ioctl::set_irq_eventfds(self.device.as_fd(), irq::ERROR, 0, &[Some(event)])
    }
}

impl Drop for VfioFunction {
    fn drop(&mut self) {
        // A removed function does no DMA, and the kernel resets a released one.
        _ = self.set_bus_master(false);
        _ = vfio_ioctl::set_irq_eventfds(self.device.as_fd(), irq::MSIX, 0, &[]);
    }
}

impl MappedBar {
    /// Length.
    pub fn len_bytes(&self) -> u64 {
        self.memory.len_bytes()
    }

    /// Unmaps the BAR, even if other handles exist: later reads return an undefined value, later
    /// writes are dropped.
    pub fn unmap(&self) {
        self.memory.unmap_file();
    }

    /// Whether access has failed: the function was removed or released.
    pub fn has_access_failed(&self) -> bool {
        self.memory.has_failed()
    }

    /// Region table that contains it.
    pub fn regions(&self) -> &RegionTable {
        &self.regions
    }

    /// Segment of the whole BAR, or as much as a segment can describe.
    pub fn segment(&self) -> Segment {
        let len_bytes = u32::try_from(self.len_bytes()).unwrap_or(u32::MAX);
        Segment { region: self.memory.id(), offset: self.memory.offset(), len_bytes }
    }

    /// Four bytes at `offset`, if they are inside.
    pub fn register_segment(&self, offset: u32) -> Option<Segment> {
        let offset = u64::from(offset);
        let is_inside = offset.is_multiple_of(4) && offset + 4 <= self.len_bytes();
        is_inside.then(|| Segment { region: self.memory.id(), offset, len_bytes: 4 })
    }
}

/// Checks that `part` is inside its BAR.
fn check_bar_range(part: BarRange, bar_bytes: u64) -> Result<(), BarMapError> {
    let end = part.offset.checked_add(part.len_bytes);
    match end {
        Some(end) if end <= bar_bytes => Ok(()),
        _ => Err(BarMapError::OutOfRange { bar_bytes }),
    }
}

fn vfio_region_index(device: &File, index: u32) -> io::Result<RegionInfo> {
    let mut about = RegionInfo { argsz: RegionInfo::BYTES, index, ..RegionInfo::default() };
    vfio_ioctl::ioctl_with(device.as_fd(), vfio_ioctl::DEVICE_GET_REGION_INFO, &mut about)?;
    Ok(about)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::io::Write;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use tenmil_dma::RegionTable;

    use tenmil_base::{BarMapError, BarRange};

    use super::{IommuMode, KernelFilesRoot, VfioFunction, VfioInterface, check_bar_range};
    use crate::AttachError;

    const AT: &str = "0000:5e:00.0";
    const ANY: IommuMode = IommuMode::Iommu { by: None };

    /// Kernel files of a function.
    fn fake_kernel_files(driver: Option<&str>, group: Option<u32>) -> tempfile::TempDir {
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
    fn range_beyond_its_bar_is_rejected() {
        let outside = Err(BarMapError::OutOfRange { bar_bytes: 0x4000 });
        for (offset, len_bytes, expected) in [
            (0, 0x4000, Ok(())),
            (0x3000, 0x1000, Ok(())),
            (0x3000, 0x1001, outside),
            (0x4000, 1, outside),
            (u64::MAX, 2, outside),
        ] {
            let part = BarRange { bar: 2, offset, len_bytes };
            assert_eq!(check_bar_range(part, 0x4000), expected, "{part:?}");
        }
    }

    fn open_error(root: &Path, address: &str) -> AttachError {
        VfioFunction::open_controller(
            &KernelFilesRoot::in_directory(root),
            address,
            ANY,
            &RegionTable::new(4),
        )
        .unwrap_err()
    }

    #[test]
    fn obstacle_is_named_with_its_fix() {
        let bound = fake_kernel_files(Some("vfio-pci"), Some(12));
        let group = KernelFilesRoot::in_directory(bound.path()).group_of_function(AT, ANY);
        assert_eq!(group.unwrap(), 12);
        let without = open_error(bound.path(), AT);
        assert!(without.to_string().contains("dev/vfio/vfio: "), "{without}");

        let absent = open_error(bound.path(), "0000:5e:00.1");
        assert_eq!(absent.to_string(), "attach 0000:5e:00.1: no PCI function is there");
        assert!(absent.hint().unwrap().contains("tenmil list"));

        let kernel = open_error(fake_kernel_files(Some("nvme"), Some(12)).path(), AT);
        let text = "attach 0000:5e:00.0: driver is 'nvme', expected 'vfio-pci'";
        assert_eq!(kernel.to_string(), text);
        assert!(kernel.hint().unwrap().contains("tenmil bind 0000:5e:00.0"));

        let none = open_error(fake_kernel_files(None, Some(12)).path(), AT);
        assert!(none.to_string().contains("driver is none"), "{none}");

        let off = open_error(fake_kernel_files(Some("vfio-pci"), None).path(), AT);
        assert!(off.to_string().contains("in no IOMMU group"), "{off}");
        assert!(off.hint().unwrap().contains("tenmil doctor"));

        let unsafely = fake_noiommu_kernel_files();
        let off = open_error(unsafely.path(), AT);
        assert!(off.to_string().contains("in no IOMMU group"), "{off}");
        assert!(off.hint().unwrap().contains("unsafe-no-iommu=yes"));
    }

    #[test]
    fn noiommu_is_only_used_on_explicit_request_and_reported() {
        let open = |root: &Path| {
            let (place, regions) = (KernelFilesRoot::in_directory(root), RegionTable::new(4));
            VfioFunction::open_controller(&place, AT, IommuMode::None, &regions).unwrap_err()
        };
        let has_one = open(fake_kernel_files(Some("vfio-pci"), Some(12)).path());
        assert!(has_one.to_string().contains("behind an IOMMU, expected none"), "{has_one}");
        assert!(has_one.hint().unwrap().contains("unsafe-no-iommu"));

        let bound = fake_noiommu_kernel_files();
        assert_eq!(
            KernelFilesRoot::in_directory(bound.path())
                .group_of_function(AT, IommuMode::None)
                .unwrap(),
            7
        );
        let without = open(bound.path());
        assert!(without.to_string().contains("dev/vfio/vfio: "), "{without}");
        let none = open(fake_kernel_files(Some("vfio-pci"), None).path());
        assert!(none.hint().unwrap().contains("--unsafe-no-iommu"), "{none}");
    }

    #[test]
    fn iommufd_is_used_if_available_and_by_name_only_then() {
        let bound = fake_kernel_files(Some("vfio-pci"), Some(12));
        let (root, regions) = (bound.path(), RegionTable::new(4));
        let open = |by| {
            let place = KernelFilesRoot::in_directory(root);
            VfioFunction::open_controller(&place, AT, IommuMode::Iommu { by }, &regions)
                .unwrap_err()
        };
        let make = |path: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            OpenOptions::new().create_new(true).write(true).open(path).unwrap();
        };
        let none = open(Some(VfioInterface::Iommufd));
        assert!(none.to_string().contains("no device node in /dev/vfio/devices"), "{none}");
        assert!(none.hint().unwrap().contains("CONFIG_VFIO_DEVICE_CDEV"));

        // Kernels without iommufd show a name without a device node.
        fs::create_dir_all(root.join("sys/bus/pci/devices").join(AT).join("vfio-dev/vfio3"))
            .unwrap();
        make("dev/iommu");
        assert!(open(None).to_string().contains("dev/vfio/vfio: "), "through its group");
        make("dev/vfio/devices/vfio3");
        let taken = open(None).to_string();
        assert!(taken.contains("make an address space"), "{taken}");
        assert!(open(Some(VfioInterface::Group)).to_string().contains("dev/vfio/vfio: "));
        fs::remove_file(root.join("dev/iommu")).unwrap();
        assert!(open(None).to_string().contains("dev/vfio/vfio: "), "nothing to reach memory by");
        assert!(open(Some(VfioInterface::Iommufd)).to_string().contains("dev/iommu: "));
    }

    /// Kernel files of a function in no-IOMMU mode.
    fn fake_noiommu_kernel_files() -> tempfile::TempDir {
        let root = fake_kernel_files(Some("vfio-pci"), Some(7));
        let group = root.path().join("sys/kernel/iommu_groups/7");
        fs::create_dir_all(&group).unwrap();
        let mut name = OpenOptions::new();
        let mut name = name.create_new(true).write(true).open(group.join("name")).unwrap();
        name.write_all(b"vfio-noiommu\n").unwrap();
        root
    }
}
