//! Schedulers against a model that knows the order of submission.

mod dispatch_order;
mod random_requests;

use super::IoScheduler;

#[test]
fn scheduler_name_round_trips() {
    for text in [
        "none",
        "merge",
        "deadline?read=5000000ns&write=100000000ns&batch=4&depth=2",
        "stream-batch?count=8&bytes=4096&time=20000ns",
    ] {
        assert_eq!(text.parse::<IoScheduler>().unwrap().to_string(), text);
    }
    let short: IoScheduler = "deadline?read=5ms".parse().unwrap();
    let IoScheduler::Deadline(options) = short else { panic!("{short}") };
    assert_eq!((options.read, options.batch), (tenmil_base::Span::from_ms(5), 16));
    assert_eq!(
        "stream-batch".parse::<IoScheduler>().unwrap().to_string(),
        "stream-batch?count=16&bytes=65536&time=50000ns"
    );
    for (text, problem) in [
        ("noop", "no scheduler `noop`, expected none, merge, "),
        ("", "no scheduler ``, expected none"),
        ("merge?depth=1", "merge:?depth=1: no parameter `depth`, expected none"),
        ("deadline?batch=0", "deadline:?batch=0: batch is `0`, expected a number from 1 to 1024"),
        ("deadline?read", "no scheduler `deadline?read`"),
    ] {
        let error = text.parse::<IoScheduler>().unwrap_err();
        assert!(error.to_string().starts_with(problem), "{error}");
        assert_eq!(error.category(), tenmil_base::ErrorCategory::Usage);
    }
}
