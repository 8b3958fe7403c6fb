//! Lists of namespaces, controllers and command sets (Base 2.1 §5.1.13.2).
//!
//! A list of identifiers has a count or ends with zero; the iterators here stop there, or at the end of
//! the page.

use crate::layout::layout;

layout! {
    /// CNS 02h, 07h, 10h and 1Ah: namespace identifiers, ascending, ended by 0 (Base 2.1 §4.6.2).
    pub struct NamespaceList[4096] {
        /// Namespace Identifiers.
        nsid @ 0: u32[1024];
    }

    /// CNS 12h and 13h, and the data structure of Namespace Attachment: controllers (Base 2.1 §4.6.1).
    pub struct ControllerList[4096] {
        /// Number of Identifiers.
        count @ 0: u16;
        /// Controller Identifiers, ascending.
        cntlid @ 2: u16[2047];
    }

    /// CNS 19h: endurance groups (Base 2.1 §5.1.13.2.16).
    pub struct EnduranceGroupList[4096] {
        /// Number of Identifiers.
        count @ 0: u16;
        /// Endurance Group Identifiers, ascending.
        endgid @ 2: u16[2047];
    }

    /// CNS 1Ch: command sets that can be enabled together (Base 2.1 §5.1.13.2.19).
    pub struct CommandSets[4096] {
        /// I/O Command Set Combinations, terminated by an empty one.
        vector @ 0: CommandSetVector[512];
    }

    /// A combination of command sets (Base 2.1 §5.1.13.2.19, Figure 330).
    pub struct CommandSetVector(u64) {
        /// NVM Command Set.
        nvm @ 0: bool;
        /// Key Value Command Set.
        key_value @ 1: bool;
        /// Zoned Namespace Command Set.
        zoned @ 2: bool;
        /// Subsystem Local Memory Command Set.
        local_memory @ 3: bool;
        /// Computational Programs Command Set.
        computational_programs @ 4: bool;
    }
}

impl NamespaceList {
    /// Maximum number of identifiers in one list (Base 2.1 §4.6.2): 4096 bytes, 4 each.
    pub const CAPACITY: usize = 1024;

    /// Builds a list of these identifiers, as many as fit.
    #[must_use]
    pub fn new(identifiers: impl IntoIterator<Item = u32>) -> Self {
        let mut list = Self::zeroed();
        for (index, nsid) in identifiers.into_iter().take(Self::CAPACITY).enumerate() {
            list.set().nsid(index, nsid);
        }
        list
    }

    /// The identifiers.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0..Self::CAPACITY).map_while(|index| self.nsid(index)).take_while(|&nsid| nsid != 0)
    }
}

impl ControllerList {
    /// Maximum number of identifiers in one list (Base 2.1 §4.6.1), which begins with their count.
    pub const CAPACITY: u16 = 2047;

    /// Builds a list of these identifiers, as many as fit.
    #[must_use]
    pub fn new(identifiers: impl IntoIterator<Item = u16>) -> Self {
        let mut list = Self::zeroed();
        for (count, cntlid) in (1..=Self::CAPACITY).zip(identifiers) {
            list.set().cntlid(usize::from(count) - 1, cntlid).count(count);
        }
        list
    }

    /// The identifiers.
    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        (0..usize::from(self.count())).map_while(|index| self.cntlid(index))
    }
}

impl EnduranceGroupList {
    /// The identifiers.
    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        (0..usize::from(self.count())).map_while(|index| self.endgid(index))
    }
}

impl CommandSets {
    /// Combinations; a combination's position is its index in the I/O Command Set Profile feature.
    pub fn iter(&self) -> impl Iterator<Item = CommandSetVector> + '_ {
        (0..512).map_while(|index| self.vector(index)).take_while(|vector| vector.0 != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::{CommandSetVector, CommandSets, ControllerList, NamespaceList};

    #[test]
    fn namespace_list_ends_with_zero_or_the_page() {
        assert_eq!(NamespaceList::new([3, 7]).iter().collect::<Vec<_>>(), [3, 7]);
        assert_eq!(NamespaceList::zeroed().iter().count(), 0);
        let full = NamespaceList::new(1..=2000);
        assert_eq!((full.iter().count(), full.iter().last()), (1024, Some(1024)));
    }

    #[test]
    fn controller_list_is_bounded_by_its_count_and_the_page() {
        let list = ControllerList::new([5, 0, 9]);
        assert_eq!(list.as_bytes()[..8], [3, 0, 5, 0, 0, 0, 9, 0]);
        assert_eq!(list.iter().collect::<Vec<_>>(), [5, 0, 9]);
        let liar = ControllerList::zeroed().with(|list| list.count(u16::MAX));
        assert_eq!(liar.iter().count(), 2047);
        assert_eq!(ControllerList::new(0..3000).iter().count(), 2047);
    }

    #[test]
    fn empty_command_set_combination_ends_the_list() {
        let nvm = CommandSetVector::zeroed().with(|vector| vector.nvm(true));
        let sets = CommandSets::zeroed().with(|sets| sets.vector(0, nvm).vector(2, nvm));
        assert_eq!(sets.iter().collect::<Vec<_>>(), [nvm]);
    }
}
