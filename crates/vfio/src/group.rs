//! Functions that no IOMMU can tell apart: the kernel opens their door once, so all that this process
//! drives of a group share it, and the memory that they reach.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use dma::Regions;

use crate::container::Container;
use crate::error::NotAttached;

/// A group that this process has.
#[derive(Debug)]
pub(crate) struct Group {
    /// Closed first: without it the kernel takes the IOMMU away.
    pub(crate) file: File,
    pub(crate) container: Container,
    number: u32,
    root: PathBuf,
}

/// Those that are open.
static OPEN: Mutex<Vec<Weak<Group>>> = Mutex::new(Vec::new());

/// The group of this number, which `open` opens if this process does not have it; its functions reach
/// memory of `regions`.
pub(crate) fn join(
    root: &Path,
    number: u32,
    address: &str,
    regions: &Regions,
    open: impl FnOnce() -> Result<(File, Container), NotAttached>,
) -> Result<Arc<Group>, NotAttached> {
    let mut groups = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    groups.retain(|group| group.strong_count() > 0);
    let found = groups.iter().filter_map(Weak::upgrade);
    let found = found.into_iter().find(|group| group.number == number && group.root == root);
    if let Some(group) = found {
        if group.container.regions().is(regions) {
            return Ok(group);
        }
        let (address, what) = (address.to_owned(), "share its group");
        let error = io::Error::other("another function of it reaches other memory of this process");
        return Err(NotAttached::Call { address, what, error });
    }
    let (file, container) = open()?;
    let group = Arc::new(Group { file, container, number, root: root.to_owned() });
    groups.push(Arc::downgrade(&group));
    Ok(group)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;

    use dma::Regions;

    use super::join;
    use crate::container::Container;

    #[test]
    fn a_group_is_opened_once_for_all_of_its_functions_and_again_when_they_have_gone() {
        let (root, regions, opened) = (tempfile::tempdir().unwrap(), Regions::new(4), Cell::new(0));
        let file = || tempfile::tempfile().unwrap();
        let of = |number, regions: &Regions| {
            join(root.path(), number, "0000:5e:00.0", regions, || {
                opened.set(opened.get() + 1);
                Ok((file(), Container::new(file(), regions.clone())))
            })
        };
        let first = of(12, &regions).unwrap();
        let second = of(12, &regions).unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        let third = of(13, &regions).unwrap();
        assert_eq!(opened.get(), 2);
        let refused = of(12, &Regions::new(4)).unwrap_err();
        assert!(refused.to_string().contains("share its group"), "{refused}");
        drop((first, second, third));
        of(12, &Regions::new(4)).unwrap();
        assert_eq!(opened.get(), 3);
    }
}
