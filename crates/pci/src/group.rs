//! IOMMU groups: the kernel permits a group to be opened once, so all functions of a group in this
//! process share the descriptor and the IOMMU context.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use tenmil_dma::RegionTable;

use crate::error::AttachError;
use crate::iommu_context::IommuContext;
use crate::vfio_function::VfioInterface;

/// IOMMU group opened by this process.
#[derive(Debug)]
pub(crate) struct VfioGroup {
    /// Closed first: without it the kernel removes the IOMMU mappings. `None` where functions have
    /// device nodes of their own.
    pub(crate) file: Option<File>,
    pub(crate) container: IommuContext,
    number: u32,
    root: PathBuf,
}

/// Reference of a function to its group, which is closed with the last one.
#[derive(Debug)]
pub(crate) struct GroupMember {
    /// `None` during drop.
    group: Option<Arc<VfioGroup>>,
}

/// Open groups. Opening and closing hold the lock: the kernel rejects opening a group before it was
/// closed.
static OPEN: Mutex<Vec<Arc<VfioGroup>>> = Mutex::new(Vec::new());

/// Returns the group of this number, opened by `open` unless this process has it; its functions
/// access memory of `regions`, through the same interface.
pub(crate) fn open_or_share_group(
    root: &Path,
    number: u32,
    address: &str,
    (regions, way): (&RegionTable, VfioInterface),
    open: impl FnOnce() -> Result<(Option<File>, IommuContext), AttachError>,
) -> Result<GroupMember, AttachError> {
    let mut groups = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let found = groups.iter().find(|group| group.number == number && group.root == root);
    if let Some(group) = found {
        let differs = match () {
            () if !group.container.regions().is_same_table(regions) => {
                "reaches other memory of this process"
            }
            () if group.container.interface() != way => "was opened in another mode (vfio=)",
            () => return Ok(GroupMember { group: Some(Arc::clone(group)) }),
        };
        let (address, what) = (address.to_owned(), "share its group");
        let error = io::Error::other(format!("another function of it {differs}"));
        return Err(AttachError::Ioctl { address, what, error });
    }
    let (file, container) = open()?;
    let group = Arc::new(VfioGroup { file, container, number, root: root.to_owned() });
    groups.push(Arc::clone(&group));
    Ok(GroupMember { group: Some(group) })
}

impl Deref for GroupMember {
    type Target = VfioGroup;

    fn deref(&self) -> &VfioGroup {
        self.group.as_ref().expect("it is there until this is dropped")
    }
}

impl Drop for GroupMember {
    fn drop(&mut self) {
        let mut groups = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        self.group = None;
        groups.retain(|group| Arc::strong_count(group) > 1);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tenmil_dma::RegionTable;

    use super::open_or_share_group;
    use crate::iommu_context::IommuContext;
    use crate::iommu_interface::IommuInterface;
    use crate::vfio_function::VfioInterface;

    #[test]
    fn group_is_opened_once_for_all_its_functions_and_again_after_the_last() {
        let (root, regions, opened) =
            (tempfile::tempdir().unwrap(), RegionTable::new(4), Cell::new(0));
        let file = || tempfile::tempfile().unwrap();
        let by = |way, number, regions: &RegionTable| {
            open_or_share_group(root.path(), number, "0000:5e:00.0", (regions, way), || {
                opened.set(opened.get() + 1);
                Ok((
                    Some(file()),
                    IommuContext::new(IommuInterface::Type1(file()), regions.clone()),
                ))
            })
        };
        let of = |number, regions: &RegionTable| by(VfioInterface::Group, number, regions);
        let first = of(12, &regions).unwrap();
        let second = of(12, &regions).unwrap();
        assert!(std::ptr::eq(&*first, &*second));
        let third = of(13, &regions).unwrap();
        assert_eq!(opened.get(), 2);
        let refused = of(12, &RegionTable::new(4)).unwrap_err();
        assert!(refused.to_string().contains("share its group"), "{refused}");
        let refused = by(VfioInterface::Iommufd, 12, &regions).unwrap_err();
        assert!(refused.to_string().contains("another mode"), "{refused}");
        drop((first, second, third));
        of(12, &RegionTable::new(4)).unwrap();
        assert_eq!(opened.get(), 3);
    }
}
