//! Comparison of a pool with its model.

use tenmil_volume::{PoolRequest, PoolResponse, SpaceUsage, VolumeInfo};

use super::Rig;
use super::model::{Cell, Model, Volume, parent_value};

/// Space usage of a volume.
pub fn account(rig: &mut Rig, name: &str) -> SpaceUsage {
    match rig.ask(PoolRequest::SpaceUsage(name.into())) {
        Ok(PoolResponse::Account(account)) => account,
        other => panic!("{other:?}"),
    }
}

/// Compares all volumes of a pool with the model.
pub fn compare(rig: &mut Rig, model: &Model) -> Result<(), String> {
    let Ok(PoolResponse::Usage(usage)) = rig.ask(PoolRequest::Usage) else {
        return Err("no usage".into());
    };
    if usage.thresholds != model.thresholds {
        return Err(format!("{:?}, expected {:?}", usage.thresholds, model.thresholds));
    }
    let Ok(PoolResponse::Volumes(found)) = rig.ask(PoolRequest::List) else {
        return Err("no list".into());
    };
    let mut names: Vec<&String> = found.iter().map(|info| &info.name).collect();
    names.sort();
    if !names.iter().copied().eq(model.volumes.keys()) {
        return Err(format!("found {names:?}, expected {:?}", model.volumes.keys()));
    }
    for info in &found {
        let expected = &model.volumes[&info.name];
        compare_volume(rig, info, expected).map_err(|error| format!("`{}`: {error}", info.name))?;
    }
    Ok(())
}

/// Checks that all differences between volumes are reported, and that reported holes are true.
pub fn compare_differences(rig: &mut Rig, model: &Model) {
    let Ok(PoolResponse::Volumes(infos)) = rig.ask(PoolRequest::List) else { panic!("no list") };
    for (index, info) in infos.iter().enumerate() {
        let base = index.checked_sub(1).map(|before| &infos[before]);
        let base = base.filter(|base| base.id == info.origin || base.origin == info.origin);
        let cells = |info: &VolumeInfo| &model.volumes[&info.name].cells;
        let value = |cells: &[Cell], block: u64| {
            cells.get(usize::try_from(block).unwrap()).map_or(0, Cell::value)
        };
        let old = base.map(cells).map_or(&[][..], |cells| cells);
        let mut at = 0;
        for (first, blocks, is_mapped) in differences(rig, base.map_or(0, |base| base.id), info.id)
        {
            for block in at..first {
                let (now, then) = (value(cells(info), block), value(old, block));
                assert_eq!(now, then, "`{}` block {block} is said to be the same", info.name);
            }
            for block in first..first + blocks {
                // A block of the parent may be a hole of the parent.
                let is_hole = is_mapped && parent_value(block) == 0;
                let is_data = value(cells(info), block) != 0;
                assert!(is_data == is_mapped || is_hole, "`{}` {block}", info.name);
            }
            at = first + blocks;
        }
        for block in at..info.blocks {
            assert_eq!(value(cells(info), block), value(old, block), "`{}` {block}", info.name);
        }
    }
}

/// Blocks of a volume that differ from those of another: first block, number of blocks, and whether they
/// have a data source.
pub fn differences(rig: &mut Rig, base: u64, volume: u64) -> Vec<(u64, u64, bool)> {
    let (mut at, mut found) = (0, Vec::new());
    loop {
        let response = rig.ask(PoolRequest::Difference { volume, base, block: at }).unwrap();
        let PoolResponse::Changed { block, blocks, is_mapped, is_parents } = response else {
            panic!("{response:?}")
        };
        if blocks == 0 {
            return found;
        }
        assert!(block >= at, "{block} after {at}");
        found.push((block, blocks, is_mapped || is_parents));
        at = block + blocks;
    }
}

fn compare_volume(rig: &mut Rig, info: &VolumeInfo, expected: &Volume) -> Result<(), String> {
    let size = expected.cells.len() as u64;
    let is_alike = (info.is_read_only, info.is_thick) == (expected.is_read_only, expected.is_thick);
    if info.blocks != size || !is_alike {
        return Err(format!("{info:?}, expected {size} blocks"));
    }
    let is_certain = expected.cells.iter().all(|cell| cell.values.len() == 1);
    // Blocks copied from a parent may be present before the overlap that excludes them.
    let written = Volume { reach: info.reach.max(expected.reach), ..expected.clone() }.mapped();
    let most = if info.reach.max(expected.reach) > 0 { u64::MAX } else { written };
    if is_certain && !(written..=most).contains(&info.mapped) {
        return Err(format!("{} blocks mapped, expected {written} to {most}", info.mapped));
    }
    let found = rig.read(info.id, 0, size).map_err(|error| error.to_string())?;
    for (block, (values, cell)) in found.iter().zip(&expected.cells).enumerate() {
        if !values.iter().all(|value| cell.may_be(*value)) {
            return Err(format!("block {block}: {values:?}, expected one of {:?}", cell.values));
        }
    }
    Ok(())
}
