//! Snapshots sent from one pool to another.

use std::io::Write;

use tenmil_base::{ErrorCategory, IoStatus, Operation};

use super::{PoolFixture, VolumeOp};
use crate::pool;
use crate::pool::{ChangedRange, INCOMPLETE, TransferSummary};
use tenmil_base::Error;

/// A writer that accepts this number of bytes.
struct LimitedWriter(usize);

impl Write for LimitedWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0 < bytes.len() {
            return Err(std::io::Error::other("the pipe is broken"));
        }
        self.0 -= bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A pool with a volume that was written before each of two snapshots.
fn pool_with_two_snapshots() -> PoolFixture {
    let bench = PoolFixture::new("64m");
    bench.create_volume("v", 4000);
    for (round, name) in [(1, "one"), (2, "two")] {
        let opened = bench.open_volume("v").unwrap();
        let mut hand = bench.volume_client(&*opened.medium, 0);
        for part in 0..4 {
            hand.write(50 * part, 50, round);
        }
        for part in 0..5 {
            hand.write(1000 * u64::from(round) + 50 * part, 50, round);
        }
        if round == 2 {
            assert_eq!(hand.run_request(Operation::Deallocate, 1100, 50), IoStatus::SUCCESS);
        }
        drop((hand, opened));
        let change =
            VolumeOp::Snapshot { volume: "v".into(), name: name.into(), uuid: round.into() };
        bench.open_pool().execute_volume_op(change).unwrap();
    }
    bench
}

fn send(bench: &PoolFixture, base: Option<&str>, name: &str) -> (Vec<u8>, TransferSummary) {
    let mut stream = Vec::new();
    let sent = bench
        .open_pool()
        .send_stream(&bench.opener(), base, name, &mut stream, &mut |_| true)
        .unwrap();
    (stream, sent)
}

fn receive(bench: &PoolFixture, mut stream: &[u8], name: &str) -> Result<TransferSummary, Error> {
    bench.open_pool().receive_stream(name, &mut stream, &mut |_| true)
}

fn volume_names(bench: &PoolFixture) -> Vec<String> {
    bench.open_pool().list_volumes().unwrap().into_iter().map(|info| info.name).collect()
}

fn volume_contents(bench: &PoolFixture, name: &str) -> Vec<u8> {
    let opened = bench.open_volume(name).unwrap();
    let mut hand = bench.volume_client(&*opened.medium, 1);
    (0..80).flat_map(|part| hand.read(part * 50, 50)).collect()
}

#[test]
fn full_and_incremental_streams_are_received() {
    let (source, target) = (pool_with_two_snapshots(), PoolFixture::new("64m"));
    let open = source.open_pool();
    let (one, two) = (open.find_volume("one").unwrap(), open.find_volume("two").unwrap());
    let mut changed = Vec::new();
    open.for_each_difference(Some(&one), &two, &mut |range| {
        changed.push(range);
        Ok(())
    })
    .unwrap();
    let of =
        |block, blocks, is_mapped| ChangedRange { block, blocks, is_mapped, is_parents: false };
    assert_eq!(changed, [of(0, 200, true), of(1100, 50, false), of(2000, 250, true)]);
    // In portions, the result is the same.
    let (mut portions, mut next) = (Vec::new(), Some(0));
    while let Some(from) = next {
        let (found, then) = open.first_differences(Some(&one), &two, from, 2).unwrap();
        assert_eq!((found.len(), then), if from == 0 { (2, Some(1150)) } else { (1, None) });
        portions.extend(found);
        next = then;
    }
    assert_eq!(portions, changed);
    assert_eq!(open.first_differences(Some(&one), &two, 2250, 2), Ok((Vec::new(), None)));
    drop(open);

    let (whole, sent) = send(&source, None, "one");
    assert_eq!((sent.data_blocks, sent.hole_blocks), (450, 0));
    let (rest, sent) = send(&source, Some("one"), "two");
    assert_eq!((sent.data_blocks, sent.hole_blocks), (450, 50));
    assert!(whole.len() < 451 * 4096, "holes are kept");

    assert!(!receive(&target, &whole, "uno").unwrap().was_there);
    let received = receive(&target, &rest, "due").unwrap();
    assert_eq!(received.base.unwrap().name, "uno");
    assert_eq!(volume_names(&target), ["uno", "due"]);
    for (sent, received) in [("one", "uno"), ("two", "due")] {
        assert_eq!(volume_contents(&target, received), volume_contents(&source, sent));
        let info = target.open_pool().find_volume(received).unwrap();
        assert!(
            info.is_read_only && info.uuid == source.open_pool().find_volume(sent).unwrap().uuid
        );
    }
    let again = receive(&target, &rest, "due").unwrap();
    assert!(again.was_there, "to receive twice is to receive");
    assert!(target.check_finds_nothing());
}

#[test]
fn truncated_or_corrupt_stream_leaves_nothing_and_can_be_resent() {
    let (source, target) = (pool_with_two_snapshots(), PoolFixture::new("64m"));
    let (whole, _) = send(&source, None, "one");
    for cut in [0, 100, 384, 5000, 500_000, whole.len() - 33, whole.len() - 1] {
        let error = receive(&target, &whole[..cut], "uno").unwrap_err();
        assert!(error.to_string().contains("it ends here"), "{cut}: {error}");
        assert_eq!(volume_names(&target), [""; 0]);
    }
    let mut wrong = whole.clone();
    wrong[600_000] ^= 4;
    let error = receive(&target, &wrong, "uno").unwrap_err();
    assert!(error.to_string().contains("of the stream: its checksum is"), "{error}");
    assert_eq!((error.category(), error.hint()), (ErrorCategory::Remote, Some("Send it again.")));

    // As a killed process leaves it.
    let uuid = source.open_pool().find_volume("one").unwrap().uuid;
    let name = format!("uno{INCOMPLETE}");
    let left = VolumeOp::Create { name: name.clone(), blocks: 7, unit: 1, uuid, checksums: false };
    target.open_pool().execute_volume_op(left).unwrap();
    receive(&target, &whole, "uno").unwrap();
    assert_eq!(volume_names(&target), ["uno"]);
    assert_eq!(volume_contents(&target, "uno"), volume_contents(&source, "one"));

    // The longest name leaves no space for a suffix.
    let longest = "n".repeat(128);
    receive(&target, &whole, &longest).unwrap();
    target
        .open_pool()
        .execute_volume_op(VolumeOp::Delete { name: longest, orphan: false })
        .unwrap();

    let foreign = VolumeOp::Create {
        name: format!("x{INCOMPLETE}"),
        blocks: 7,
        unit: 1,
        uuid: 5,
        checksums: false,
    };
    target.open_pool().execute_volume_op(foreign).unwrap();
    let error = receive(&target, &whole, "x").unwrap_err();
    assert!(error.to_string().contains("expected what an earlier receive"), "{error}");
    assert!(target.check_finds_nothing());
}

#[test]
fn wrong_incremental_base_is_rejected() {
    let (source, target) = (pool_with_two_snapshots(), PoolFixture::new("64m"));
    let (rest, _) = send(&source, Some("one"), "two");
    let error = receive(&target, &rest, "due").unwrap_err();
    assert!(error.to_string().contains("found no snapshot at all"), "{error}");
    target.create_volume("v", 10);
    let other = VolumeOp::Snapshot { volume: "v".into(), name: "one".into(), uuid: 77 };
    target.open_pool().execute_volume_op(other).unwrap();
    let error = receive(&target, &rest, "due").unwrap_err();
    let text = error.to_string();
    assert!(text.contains("found `one`, which is 0000000000000000000000000000004d"), "{text}");
    assert!(text.contains("expected snapshot 00000000000000000000000000000001"), "{text}");
    assert!(error.hint().unwrap().contains("Receive `one` first"));
    let error = receive(&target, &rest, "v").unwrap_err();
    assert!(error.to_string().contains("the name is in use"), "{error}");
    assert_eq!(volume_names(&target), ["v", "one"]);

    let refused = source
        .open_pool()
        .send_stream(&source.opener(), None, "v", &mut Vec::new(), &mut |_| true)
        .unwrap_err();
    assert!(refused.to_string().contains("is a volume, expected a snapshot"), "{refused}");
    let refused = source
        .open_pool()
        .send_stream(&source.opener(), None, "two", &mut LimitedWriter(70_000), &mut |_| true)
        .unwrap_err();
    assert!(refused.to_string().contains("write the stream: the pipe is broken"), "{refused}");
    let stopped = source
        .open_pool()
        .send_stream(&source.opener(), None, "two", &mut Vec::new(), &mut |_| false)
        .unwrap_err();
    assert!(stopped.to_string().contains("was interrupted"), "{stopped}");
}

#[test]
fn snapshot_being_sent_is_kept_and_receives_are_exclusive() {
    let (source, target) = (pool_with_two_snapshots(), PoolFixture::new("64m"));
    let open = source.open_pool();
    let delete =
        |name: &str| open.execute_volume_op(VolumeOp::Delete { name: name.into(), orphan: false });
    let users = || ["one", "two"].map(|name| open.user_count(&open.find_volume(name).unwrap()));
    let (mut stream, mut looks) = (Vec::new(), 0);
    open.send_stream(&source.opener(), Some("one"), "two", &mut stream, &mut |_| {
        for name in ["one", "two"] {
            let refused = delete(name).unwrap_err();
            assert!(refused.to_string().contains("would lose it"), "{refused}");
        }
        assert_eq!(users(), [1, 1]);
        looks += 1;
        true
    })
    .unwrap();
    assert!(looks > 0 && users() == [0, 0], "{looks}");
    let (whole, _) = send(&source, None, "one");
    looks = 0;
    let to = target.open_pool();
    to.receive_stream("uno", &mut &whole[..], &mut |_| {
        let refused = receive(&target, &whole, "uno").unwrap_err();
        assert!(refused.to_string().contains("it is being received already"), "{refused}");
        assert!(refused.hint().unwrap().contains("tenmil get jobs"));
        looks += 1;
        true
    })
    .unwrap();
    assert!(looks > 0 && receive(&target, &whole, "uno").unwrap().was_there);

    // Another change takes the name during the transfer: nothing remains of the received snapshot.
    target.create_volume("v", 10);
    let taken = to.receive_stream("due", &mut &whole[..], &mut |_| {
        let change = VolumeOp::Snapshot { volume: "v".into(), name: "due".into(), uuid: 9 };
        let _ = to.execute_volume_op(change);
        true
    });
    assert!(taken.unwrap_err().to_string().contains("`due`"));
    assert_eq!(volume_names(&target), ["uno", "v", "due"]);
    // Also for the name of the incomplete volume.
    let part = || format!("tre{INCOMPLETE}");
    let taken = to.receive_stream("tre", &mut &whole[..], &mut |_| {
        let _ = to.execute_volume_op(VolumeOp::Rename { name: part(), to: "aside".into() });
        let change = VolumeOp::Snapshot { volume: "v".into(), name: part(), uuid: 9 };
        let _ = to.execute_volume_op(change);
        true
    });
    assert!(taken.unwrap_err().to_string().contains("has become another volume meanwhile"));
    to.execute_volume_op(VolumeOp::Delete { name: "aside".into(), orphan: false }).unwrap();
    delete("two").unwrap();
    drop((open, to));
    assert!(source.check_finds_nothing() && target.check_finds_nothing());
}

#[test]
fn stream_without_space_is_rejected_and_frees_its_blocks() {
    let (source, target) = (pool_with_two_snapshots(), PoolFixture::new("3m"));
    let (whole, _) = send(&source, None, "one");
    let error = receive(&target, &whole[..], "uno").map(drop);
    // 450 blocks fit in 768; a second volume uses the rest.
    error.unwrap();
    let (rest, _) = send(&source, Some("one"), "two");
    let error = receive(&target, &rest, "due").unwrap_err();
    assert_eq!(error.category(), ErrorCategory::Environment);
    assert!(error.to_string().contains("the pool has no space"), "{error}");
    assert!(error.hint().unwrap().contains("or grow it"), "{error}");
    assert_eq!(volume_names(&target), ["uno"]);
    assert_eq!(volume_contents(&target, "uno"), volume_contents(&source, "one"));
    let place = pool::VolumeRef::pool_on(&target.device_uri().parse().unwrap());
    assert!(pool::check_closed_pool(&target.opener(), &place).unwrap().report.findings.is_empty());
}
