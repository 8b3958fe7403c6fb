//! Functions that no IOMMU can tell apart: the kernel opens their door once, so all that this process
//! drives of a group share it, and the memory that they reach.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use dma::Regions;

use crate::container::Container;
use crate::error::NotAttached;
use crate::function::Way;

/// A group that this process has.
#[derive(Debug)]
pub(crate) struct Group {
    /// Closed first: without it the kernel takes the IOMMU away. None where functions have doors of
    /// their own.
    pub(crate) door: Option<File>,
    pub(crate) container: Container,
    number: u32,
    root: PathBuf,
}

/// A function's share in its group, which is closed with the last.
#[derive(Debug)]
pub(crate) struct Joined {
    /// None while this is dropped.
    group: Option<Arc<Group>>,
}

/// Those that are open. A group is opened and closed with the lock held: the kernel has one refused
/// that is opened again before it is closed.
static OPEN: Mutex<Vec<Arc<Group>>> = Mutex::new(Vec::new());

/// The group of this number, which `open` opens if this process does not have it; its functions reach
/// memory of `regions`, and are taken in the same way.
pub(crate) fn join(
    root: &Path,
    number: u32,
    address: &str,
    (regions, way): (&Regions, Way),
    open: impl FnOnce() -> Result<(Option<File>, Container), NotAttached>,
) -> Result<Joined, NotAttached> {
    let mut groups = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let found = groups.iter().find(|group| group.number == number && group.root == root);
    if let Some(group) = found {
        let differs = match () {
            () if !group.container.regions().is(regions) => "reaches other memory of this process",
            () if group.container.way() != way => "was taken in another way (vfio=)",
            () => return Ok(Joined { group: Some(Arc::clone(group)) }),
        };
        let (address, what) = (address.to_owned(), "share its group");
        let error = io::Error::other(format!("another function of it {differs}"));
        return Err(NotAttached::Call { address, what, error });
    }
    let (door, container) = open()?;
    let group = Arc::new(Group { door, container, number, root: root.to_owned() });
    groups.push(Arc::clone(&group));
    Ok(Joined { group: Some(group) })
}

impl Deref for Joined {
    type Target = Group;

    fn deref(&self) -> &Group {
        self.group.as_ref().expect("it is there until this is dropped")
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        let mut groups = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        self.group = None;
        groups.retain(|group| Arc::strong_count(group) > 1);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use dma::Regions;

    use super::join;
    use crate::container::Container;
    use crate::function::Way;
    use crate::iommu::Iommu;

    #[test]
    fn a_group_is_opened_once_for_all_of_its_functions_and_again_when_they_have_gone() {
        let (root, regions, opened) = (tempfile::tempdir().unwrap(), Regions::new(4), Cell::new(0));
        let file = || tempfile::tempfile().unwrap();
        let by = |way, number, regions: &Regions| {
            join(root.path(), number, "0000:5e:00.0", (regions, way), || {
                opened.set(opened.get() + 1);
                Ok((Some(file()), Container::new(Iommu::Type1(file()), regions.clone())))
            })
        };
        let of = |number, regions: &Regions| by(Way::Group, number, regions);
        let first = of(12, &regions).unwrap();
        let second = of(12, &regions).unwrap();
        assert!(std::ptr::eq(&*first, &*second));
        let third = of(13, &regions).unwrap();
        assert_eq!(opened.get(), 2);
        let refused = of(12, &Regions::new(4)).unwrap_err();
        assert!(refused.to_string().contains("share its group"), "{refused}");
        let refused = by(Way::Iommufd, 12, &regions).unwrap_err();
        assert!(refused.to_string().contains("another way"), "{refused}");
        drop((first, second, third));
        of(12, &Regions::new(4)).unwrap();
        assert_eq!(opened.get(), 3);
    }
}
