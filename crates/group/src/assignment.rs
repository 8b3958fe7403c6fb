//! Assignment of ANA groups to members: each member computes it from the shared map alone, and all compute the
//! same.
//!
//! The numbers of groups of two members differ by one at most. A group moves only if its owner is gone, is
//! draining, cannot open its devices, or has more than its share. It does not move to a member that has just
//! joined, to which hosts have not connected yet, unless there is no other.

use std::collections::BTreeMap;

use super::records::MemberRecord;

/// Owner that each group should have. A group that no member can open has none.
pub(crate) fn assign_groups(
    members: &BTreeMap<String, MemberRecord>,
    owners: &BTreeMap<u32, Option<String>>,
) -> BTreeMap<u32, Option<String>> {
    let owns = |name: &str| owners.values().any(|owner| owner.as_deref() == Some(name));
    let names_of = |is_eligible: &dyn Fn(&str, &MemberRecord) -> bool| -> Vec<&str> {
        let found = members.iter().filter(|(name, member)| is_eligible(name, member));
        found.map(|(name, _)| name.as_str()).collect()
    };
    let mut eligible = names_of(&|name, it| !it.is_draining && (it.is_settled || owns(name)));
    if eligible.is_empty() {
        eligible = names_of(&|_, it| !it.is_draining);
    }
    // If all are draining, the groups stay where they are.
    if eligible.is_empty() {
        eligible = names_of(&|_, _| true);
    }
    let may_open = |name: &str, group: u32| {
        members.get(name).is_some_and(|member| !member.refused.contains(&group))
    };
    let mut kept: BTreeMap<&str, Vec<u32>> =
        eligible.iter().map(|name| (*name, Vec::new())).collect();
    let mut assigned: BTreeMap<u32, Option<String>> =
        owners.keys().map(|group| (*group, None)).collect();
    for (group, owner) in owners {
        if let Some(owner) = owner
            && may_open(owner, *group)
            && let Some(groups) = kept.get_mut(owner.as_str())
        {
            groups.push(*group);
        }
    }
    let quotas = quotas(owners.len(), &kept);
    for (name, groups) in &mut kept {
        groups.truncate(quotas[name]);
        for group in groups {
            assigned.insert(*group, Some((*name).to_owned()));
        }
    }
    let mut counts: BTreeMap<&str, usize> =
        kept.iter().map(|(name, groups)| (*name, groups.len())).collect();
    let unassigned: Vec<u32> =
        assigned.iter().filter(|(_, owner)| owner.is_none()).map(|(group, _)| *group).collect();
    for group in unassigned {
        let candidates = counts.iter().filter(|(name, _)| may_open(name, group));
        let least = candidates.min_by_key(|(name, count)| (**count, **name)).map(|(name, _)| *name);
        // A member that has just joined, or is draining, is better than none.
        let other = || {
            let stays = owners.get(&group).and_then(Option::as_deref);
            let stays = stays.filter(|name| may_open(name, group));
            let able = || members.iter().filter(|(name, _)| may_open(name, group));
            let least = able().min_by_key(|(name, it)| (it.is_draining, *name));
            stays.or_else(|| least.map(|(name, _)| name.as_str()))
        };
        if let Some(name) = least.or_else(other) {
            *counts.entry(name).or_default() += 1;
            assigned.insert(group, Some(name.to_owned()));
        }
    }
    assigned
}

/// Largest number of groups that each member keeps: members with the most groups keep one more if the groups
/// cannot be divided equally.
fn quotas<'a>(groups: usize, kept: &BTreeMap<&'a str, Vec<u32>>) -> BTreeMap<&'a str, usize> {
    let Some(each) = groups.checked_div(kept.len()) else { return BTreeMap::new() };
    let mut by_count: Vec<(&str, usize)> =
        kept.iter().map(|(name, groups)| (*name, groups.len())).collect();
    by_count.sort_by_key(|(name, count)| (usize::MAX - count, *name));
    let more = groups % kept.len();
    let quota = |at: usize| if at < more { each + 1 } else { each };
    by_count.into_iter().enumerate().map(|(at, (name, _))| (name, quota(at))).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use tenmil_base::Random;

    use super::{MemberRecord, assign_groups};

    fn members(names: &[&str]) -> BTreeMap<String, MemberRecord> {
        let settled = MemberRecord { is_settled: true, ..MemberRecord::default() };
        names.iter().map(|name| ((*name).to_owned(), settled.clone())).collect()
    }

    fn owners(list: &[(u32, &str)]) -> BTreeMap<u32, Option<String>> {
        let owner = |name: &str| (!name.is_empty()).then(|| name.to_owned());
        list.iter().map(|(group, name)| (*group, owner(name))).collect()
    }

    #[test]
    fn groups_without_an_owner_go_to_the_member_with_the_fewest() {
        let assigned =
            assign_groups(&members(&["a", "b", "c"]), &owners(&[(1, "a"), (2, "dead"), (3, "")]));
        assert_eq!(assigned, owners(&[(1, "a"), (2, "b"), (3, "c")]));
    }

    #[test]
    fn joining_member_gets_its_share_and_no_more() {
        let before = owners(&[(1, "a"), (2, "a"), (3, "b"), (4, "b")]);
        let assigned = assign_groups(&members(&["a", "b", "c"]), &before);
        let moved = assigned.iter().filter(|(group, owner)| before[*group] != **owner);
        assert_eq!(moved.collect::<Vec<_>>(), [(&4, &Some("c".to_owned()))]);
    }

    #[test]
    fn member_that_has_just_joined_gets_groups_only_if_there_is_no_other() {
        let mut all = members(&["a", "b"]);
        all.get_mut("b").unwrap().is_settled = false;
        let before = owners(&[(1, "a"), (2, "a"), (3, "")]);
        assert_eq!(assign_groups(&all, &before), owners(&[(1, "a"), (2, "a"), (3, "a")]));
        all.get_mut("a").unwrap().is_draining = true;
        assert_eq!(assign_groups(&all, &before), owners(&[(1, "b"), (2, "b"), (3, "b")]));
        // It keeps what it has got, though others have settled.
        all.get_mut("a").unwrap().is_draining = false;
        let later = owners(&[(1, "b"), (2, "b"), (3, "b")]);
        let assigned = assign_groups(&all, &later);
        assert_eq!(assigned.values().filter(|owner| owner.as_deref() == Some("b")).count(), 2);
    }

    #[test]
    fn draining_member_keeps_nothing_unless_all_drain() {
        let mut all = members(&["a", "b"]);
        let before = owners(&[(1, "a"), (2, "b")]);
        all.get_mut("a").unwrap().is_draining = true;
        assert_eq!(assign_groups(&all, &before), owners(&[(1, "b"), (2, "b")]));
        all.get_mut("b").unwrap().is_draining = true;
        assert_eq!(assign_groups(&all, &before), before);
    }

    #[test]
    fn member_that_cannot_open_a_group_does_not_get_it() {
        let mut all = members(&["a", "b"]);
        all.get_mut("a").unwrap().refused = vec![1];
        let before = owners(&[(1, "a"), (2, "b")]);
        assert_eq!(assign_groups(&all, &before)[&1].as_deref(), Some("b"));
        all.get_mut("b").unwrap().is_draining = true;
        assert_eq!(assign_groups(&all, &before)[&1].as_deref(), Some("b"));
        all.get_mut("b").unwrap().refused = vec![1];
        assert_eq!(assign_groups(&all, &before)[&1], None);
    }

    /// An assignment is stable: applied, it moves nothing; and shares differ by one.
    #[test]
    fn random_assignments_are_balanced_and_stable() {
        let mut random = Random::new(1);
        let names = ["a", "b", "c", "d", "e"];
        for _ in 0..500 {
            let count = 1 + usize::try_from(random.below(5)).unwrap();
            let all = members(&names[..count]);
            let groups = 1 + u32::try_from(random.below(12)).unwrap();
            let mut before = BTreeMap::new();
            for group in 1..=groups {
                let owner = names.get(usize::try_from(random.below(7)).unwrap());
                before.insert(group, owner.map(|name| (*name).to_owned()));
            }
            let assigned = assign_groups(&all, &before);
            let share = |name: &str| {
                assigned.values().filter(|owner| owner.as_deref() == Some(name)).count()
            };
            let shares: Vec<usize> = names[..count].iter().map(|name| share(name)).collect();
            let (least, most) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
            assert!(most - least <= 1, "{before:?} {assigned:?}");
            assert_eq!(shares.iter().sum::<usize>(), before.len());
            assert_eq!(assign_groups(&all, &assigned), assigned);
        }
    }
}
