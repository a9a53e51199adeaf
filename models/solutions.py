"""Worked solutions for the 85 gsm_symbolic templates, in a form a five-million-parameter model can learn.

reasoning-gym's own `answer_cot` states results such as `3071 / 37 = 83` in one go. A small model cannot guess
them, so every step here is rewritten as a line `label: expression=result` whose hidden arithmetic is spelled
out down to facts of at most two digits by one:

    37*83   ->  37*83=2960+111=3071                     partial products of the second factor's digits
    258*6   ->  258*6=1200+348=1548                     the longer factor is split instead
    3071/37 ->  3071/37(37*80=2960,3071-2960=111,37*3=111)=83      long division, one quotient digit at a time
    15%3900 ->  15% of 3900=15*39=450+135=585           hundreds cancel first

Questions and final answers are reasoning-gym's own; `solve` raises if the last step is not its answer
(0.15 % of problems, where reasoning-gym truncated a float; those are left out everywhere).
`PLANS` holds one plan per template, in terms of the variables in the problem's metadata. A step is
`label = a op b op c`, evaluated from left to right; `p % x` is p percent of x, `f of x` a fraction of x, `//` a
division that drops the remainder (where the template does).
Numbers are exact (`Fraction`), printed as decimals.
"""

import re
from fractions import Fraction

Number = Fraction


def show(x: Number) -> str:
    """Exact decimal text: 7, 0.25, 22.62. A fraction without a short decimal form is written p/q."""
    if x.denominator == 1:
        return str(x.numerator)
    for places in range(1, 5):
        if (x * 10**places).denominator == 1:
            digits = str(abs(x.numerator) * 10**places // x.denominator).rjust(places + 1, "0")
            return ("-" if x < 0 else "") + digits[:-places] + "." + digits[-places:]
    return f"{x.numerator}/{x.denominator}"


def digits_and_place(x: Number) -> tuple[str, Number]:
    """x = int(digits) * place with no trailing zero in digits: 3900 -> ('39', 100), 0.58 -> ('58', 1/100)."""
    text = show(abs(x)).replace(".", "").lstrip("0")
    digits = text.rstrip("0") or "0"
    return digits, abs(x) / int(digits) if x else Number(1)


def multiply(a: Number, b: Number) -> tuple[str, Number]:
    """`a*b=...=result`; longer products first state their partial products as equations of their own."""
    result = a * b
    head = f"{show(a)}*{show(b)}"
    (da, place_a), (db, place_b) = digits_and_place(a), digits_and_place(b)
    if "1" in (da, db) or len(da) + len(db) <= 3:
        return f"{head}={show(result)}", result
    if len(db) == 1 or len(da) == 1:  # split the longer factor after its leading digits: 258 -> 200 + 58
        long, place, short = (da, place_a, b) if len(db) == 1 else (db, place_b, a)
        cut = max(2, len(long) - 2)
        low = int(long[-cut:]) * place
        parts = [(abs(int(long[:-cut])) * place * 10**cut) * abs(short), low * abs(short)]
    else:  # one partial product per non-zero digit of b
        pieces = [int(d) * place_b * 10 ** (len(db) - 1 - i) for i, d in enumerate(db) if d != "0"]
        parts = [abs(a) * piece for piece in pieces]
        if len(da) > 2:
            lines = ",".join(multiply(abs(a), piece)[0] for piece in pieces)
            return f"{head}({lines})={chain('+', parts)}", result
    return f"{head}={chain('+', [p for p in parts if p])}", result


def chain(op: str, parts: list[Number]) -> str:
    """A sum or difference, two numbers at a time: 5+7+9 -> `5+7+9=12+9=21`."""
    parts = list(parts)
    text = op.join(map(show, parts))
    while len(parts) > 1:
        head = parts[0] + parts[1] if op == "+" else parts[0] - parts[1]
        parts[:2] = [head]
        text += "=" + op.join(map(show, parts))
    return text


def divide(a: Number, b: Number) -> tuple[str, Number]:
    """`a/b=result`, with one product and one difference per quotient digit where the quotient is not obvious."""
    result = a / b
    head = f"{show(a)}/{show(b)}"
    digits, place = digits_and_place(result)
    easy = (
        len(digits) == 1
        or digits_and_place(b)[0] == "1"
        or (b.denominator == 1 and b < 10 and len(digits) <= 2)
        or b == 2
    )
    if easy or "/" in show(result):
        return f"{head}={show(result)}", result
    rest, work = a, []
    pieces = [int(d) * place * 10 ** (len(digits) - 1 - i) for i, d in enumerate(digits) if d != "0"]
    for piece in pieces:
        work.append(f"{show(b)}*{show(piece)}={show(b * piece)}")
        if piece is not pieces[-1]:
            work.append(f"{show(rest)}-{show(b * piece)}={show(rest - b * piece)}")
        rest -= b * piece
    return f"{head}({','.join(work)})={show(result)}", result


def divide_down(a: Number, b: Number) -> tuple[str, Number]:
    """`a//b=quotient` without the remainder: 78//24(24*3=72,78-72=6)=3."""
    result = Number(a // b)
    head = f"{show(a)}//{show(b)}"
    if result == 0 or b == 100 or (b < 10 and result < 100):
        return f"{head}={show(result)}", result
    rest, work = a, []
    digits = show(result)
    for i, d in enumerate(digits):
        piece = int(d) * Number(10) ** (len(digits) - 1 - i)
        if piece:
            work += [
                f"{show(b)}*{show(piece)}={show(b * piece)}",
                f"{show(rest)}-{show(b * piece)}={show(rest - b * piece)}",
            ]
            rest -= b * piece
    return f"{head}({','.join(work)})={show(result)}", result


def percent(p: Number, x: Number) -> tuple[str, Number]:
    """p percent of x. Hundreds cancel first: 15% of 3900=15*39=..., otherwise the product is divided by 100."""
    head = f"{show(p)}% of {show(x)}="
    if x % 100 == 0:
        return head + multiply(p, x / 100)[0], p * x / 100
    if p % 10 == 0 and x % 10 == 0:
        return head + multiply(p / 10, x / 10)[0], p * x / 100
    text, product = multiply(p, x)
    return f"{head}{text}/100={show(product / 100)}", product / 100


def part(f: Number, x: Number) -> tuple[str, Number]:
    """The fraction f of x: 3/4 of 48=48/4*3=12*3=36."""
    one, value = divide(x, Number(f.denominator))
    text = f"{f.numerator}/{f.denominator} of {show(x)}={one}"
    if f.numerator == 1:
        return text, value
    more, value = multiply(value, Number(f.numerator))
    return f"{text},{more}", value


PLANS = {
    0: (
        "peeling = total_amount / peel_rate; batches = total_amount / batch_size; "
        "cooking = batches * time_per_batch; total = cooking + peeling"
    ),
    1: "others = building_blocks + stuffed_animals + stacking_rings; balls = total_toys - others",
    2: (
        "first = percent_group1 % total_students; rest = total_students - first; "
        "others = percent_group23 * rest // 100; leaving = first + others"
    ),
    3: (
        "pals = initial_penpals - lost_penpals; letters = pals * letters_per_week; "
        "pages = letters * pages_per_letter; minutes = pages * minutes_per_page; hours = minutes // 60"
    ),
    4: "pieces = num_jars * per_jar; pans = pieces // per_pan",
    5: "collected = signatures1 + signatures2; needed = goal - collected",
    6: "boys = n_girls * multiplier; kids = n_girls + boys",
    7: (
        "before = num_ledges * plants_per_ledge; total = before + plants_received; "
        "given = num_ledges * plants_to_give; remaining = total - given"
    ),
    8: "parts = sugar_ratio + water_ratio; one_part = total_items / parts; sugar = one_part * sugar_ratio",
    9: (
        "money = num_bills * bill_value; first = num_items1 * price1; second = num_items2 * price2; "
        "spent = first + second; left = money - spent"
    ),
    10: "future = age1 * mult; now = future - years",
    11: (
        "had = initial_amount * multiplier; old = had + initial_amount; bought = bought_amount - difference; "
        "new = bought + bought_amount; total = old + new"
    ),
    12: "first = time1 * num1; second = time2 * num2; total = first + second",
    13: "first = length1 / speed1; second = length2 / speed2; longer = first - second",
    14: "combined = time1 + time2; minutes = combined * multiplier",
    15: (
        "second = price1 + price2; shoes = price3 / 2; coupon = price4 - discount; "
        "total = price1 + second + shoes + coupon"
    ),
    16: "base = big / mult1; friends = base * mult2",
    17: (
        "occupied = initial_fraction of total_capacity; empty = total_capacity - occupied; "
        "weekly = daily_patients * 7; admitted = weekly * period_weeks; left = empty - admitted"
    ),
    18: "half = score1 / 2; other = half + bonus; total = score1 + other",
    19: (
        "second = initial_kernels * multiplier_2; third = initial_kernels * multiplier_3; final = third / 2; "
        "after = final / 4; total = initial_kernels + second + third + final + after"
    ),
    20: "placed = capacity_per_tray * num_trays; left = total_items - placed",
    21: "fit = bed_length / plant_spacing; buy = fit - owned_plants; cost = buy * cost_per_plant",
    22: (
        "brokerage = brokerage_fee % price; transfer = transfer_fee % price; "
        "total = price + brokerage + transfer; more = total - budget"
    ),
    23: "lost = hourly_rate * hours; saved = lost - fee",
    24: "second = relative_age * multiple; first = second - orbit_period",
    25: "left = total_target - consumed; eaten = left / calories; serving = size / servings; amount = eaten * serving",
    26: "balls = fraction_first of total_balls; colored = fraction_second of balls",
    27: (
        "first = first_complexes * apartments_per_complex; more = percent_increase % first; last = first + more; "
        "total = first + last; visits = total * collections_per_week; pay = rate_per_apartment * visits"
    ),
    28: (
        "more = percent_increase % base_price; price = base_price + more; amount = usage_per_day * 7; "
        "cost = price * amount; total = cost + extra_price"
    ),
    29: "all = puppies1 + puppies2; spotted = spotted1 + spotted2; percentage = spotted * 100 / all",
    30: "double = hobby2_count * 2; rest = total_students - hobby1_count - hobby2_count - double",
    31: (
        "second = first_person_slices + second_person_extra; third = second + third_person_extra; "
        "total = first_person_slices + second + third"
    ),
    33: "fast = base_rate * multiplier; daily = fast + base_rate; weekly = daily * 7",
    34: "twins = items_per_twin * 2; rest = total_items - twins; friends = rest - unfound_items",
    36: (
        "easy = easy_percent % total_questions; others = total_questions - easy; "
        "sure = easy_correct_percent % easy; half = others / 2; points = sure + half"
    ),
    38: (
        "each = skeins_per_item1 + skeins_per_item2 + skeins_per_item3 + skeins_per_item4 + skeins_per_item5; "
        "total = each * count"
    ),
    39: "boys = total_students - num_girls; present = boys - absent_boys",
    40: "more = p % n1; second = n1 + more; third = n1 + second; total = n1 + second + third",
    41: "help = fraction of total_cost; covered = help + current_amount; missing = total_cost - covered",
    42: (
        "first = fee1_percent % price; second = fee2_percent % price; total = first + second + loan; "
        "proceeds = price - total"
    ),
    43: "other = first_amount - difference; total = first_amount + other",
    44: (
        "first = quantities1 * prices1; second = quantities2 * prices2; third = quantities3 * prices3; "
        "total = first + second + third"
    ),
    45: "total = remaining + used_items; package = total - husband_package",
    46: (
        "second = water_fraction2 of initial_amount2; rest = initial_amount1 - spilled_amount; "
        "first = water_fraction1 of rest; water = second + first"
    ),
    47: "first = items1_count * item1_cost; second = items2_count * item2_cost; total = first + second + paper_cost",
    48: "first = n1 * price1; second = n2 * price2; more = first - second",
    49: (
        "share = 100 - percent_change; spent = share % total_spent; cents = spent * 100; "
        "first = price1 * num_item1; rest = cents - first; number = rest // price2"
    ),
    50: "half = puzzle1_pieces / 2; total = half + puzzle2_pieces",
    51: "rides = cost2 * times; each = tokens + cost1 + rides; people = budget / each; friends = people - 1",
    52: (
        "full = alphabet_count * times_written; part = fraction of alphabet_count; once = full + part; total = once * 2"
    ),
    53: "above = sides - target; chance = above * 100 / sides; more = chance - 25",
    54: "first = total_time - library_time; left = first - station_time",
    55: "half = n / 2; total = half + n",
    56: "two = n1 + n2; rest = total - two",
    57: "double = tennis_players * 2; third = soccer_boys + soccer_girls; total = tennis_players + double + third",
    58: "drunk = volume * num_containers; calories = drunk * calories",
    59: "intervals = total_distance / distance_per_interval; minutes = intervals * time_per_interval",
    60: (
        "slow = sidewalk_distance * beach_time; double = beach_distance * 2; sidewalk = slow // double; "
        "total = beach_time + sidewalk"
    ),
    62: "second = slices_per_day * multiplier; daily = slices_per_day + second; days = num_slices / daily",
    64: (
        "first = eggs_per_day_first * days_first; second = eggs_per_day_second * days_second; "
        "total = first + second; dozens = total / 12"
    ),
    66: (
        "whole = whole_hours * 60; all = whole + extra_minutes; known = hour1 + hour1 + hour2 + hour3 + hour3; "
        "minutes = known * 60; rest = all - minutes - min2; episodes = rest / min1"
    ),
    67: "two = day1_amount + day2_amount; third = day1_amount * multiplier; total = two + third",
    68: (
        "new = initial_infected * infection_rate; first = initial_infected + new; new = first * infection_rate; "
        "second = first + new; new = second * infection_rate; third = second + new"
    ),
    69: "done = fraction of total_pages; left = total_pages - done",
    70: "kept = initial_count - dropped; found = kept + found_count; real = found - fake_count",
    71: "first = n1 * p1; second = n2 * p2; third = n3 * p3; total = first + second + third",
    72: "second = n1 * mult; rest = total - n1 - second",
    73: (
        "more = gingerbread_day1 + gingerbread_increase; boxes = gingerbread_day1 + more; "
        "first = boxes * gingerbread_price; fewer = apple_pie_day2 - apple_pie_difference; "
        "pies = fewer + apple_pie_day2; second = pies * apple_pie_price; total = first + second"
    ),
    75: "half = n1 // 2; triple = n2 * 3; total = half + triple",
    78: "older = age1 + age_diff; sum = older + age1; average = sum / 2",
    80: (
        "first = light_color1_spools + dark_color1_spools; second = light_color2_spools + dark_color2_spools; "
        "all = first + second; percentage = first * 100 / all"
    ),
    81: "days = days_per_week * weeks_per_month; month = days * pay_per_day; year = month * 12",
    82: "ignored = no_response_percent % num_emails; daily = num_emails - ignored; total = daily * workdays",
    83: "rest = total_fence - difference; share = rest / 2",
    84: (
        "double = time_cold * 2; warm = double + extra_time; cold = time_cold * distance; hot = warm * distance; "
        "longer = hot - cold"
    ),
    85: "long = length * factor; width = area / long; half = long + width; perimeter = half * 2",
    88: "used = graduate_seats + faculty_seats; rest = total_seats - used; tickets = rest / graduate_seats",
    89: (
        "eggs = num_dozen * 12; second = found_first * 2; third = second - less_amount; fourth = third / 2; "
        "found = found_first + second + third + fourth; hidden = eggs - found"
    ),
    91: "harvest = field_size * density; times = 12 / months_per_harvest; year = harvest * times",
    92: (
        "first = quantities1 * rounded_prices1; second = quantities2 * rounded_prices2; "
        "third = quantities3 * rounded_prices3; total = first + second + third"
    ),
    93: "second = fraction1 of initial_kills; third = second * multiplier; fourth = fraction2 of third",
    94: (
        "value = num_shares * price_per_share; rise = increase_pct % value; high = value + rise; "
        "fall = decrease_pct % high; final = high - fall"
    ),
    95: "daily = daily_servings1 + daily_servings2 + daily_servings3; total = daily * period_days",
    96: "double = n1 * 2; each = double - n2; second = each * k2; first = n1 * k1; total = second + first",
    99: "cost = quantity * unit_price; left = initial_amount - cost",
}
STEPS = {k: [s.strip().split(" = ") for s in plan.split(";")] for k, plan in PLANS.items()}
ONE_STEP = {"*": multiply, "/": divide, "//": divide_down, "%": percent, "of": part}


def number(v) -> Number | None:
    """Metadata value -> exact number (floats and '2/3' become short fractions), None for words."""
    if isinstance(v, str) and not re.fullmatch(r"-?\d+(/\d+)?", v):
        return None
    return Number(v).limit_denominator(1000) if isinstance(v, float) else Number(v)


def inputs(template: int, variables: dict, question: str) -> dict[str, Number]:
    """The numbers a plan may name: the metadata's own, lists as name1, name2, ..., and a few read off the question."""
    names = {}
    for name, value in variables.items():
        for i, v in enumerate(value if isinstance(value, list) else [value]):
            x = number(v)
            if x is not None:
                names[f"{name}{i + 1}" if isinstance(value, list) else name] = x
    if template == 16:
        names["big"] = number(re.search(r"has (\d+) friends on", question)[1])
    elif template == 66:
        minutes = Number(round(variables["total_hours"] * 60))
        names["whole_hours"], names["extra_minutes"] = Number(minutes // 60), Number(minutes % 60)
    elif template == 70:
        names["dropped"] = number(re.search(r"dropped (\d+) of", question)[1])
    elif template == 85:
        names["factor"] = names["length_converted"] / names["length"]
    elif template == 95:
        names["period_days"] = Number(7 if variables["time_period"] == "week" else 30)
    return names


def solve(template: int, question: str, variables: dict, answer: str) -> str:
    """Worked steps, one a line, ending in `#### answer`."""
    names = inputs(template, variables, question)
    lines = []
    for label, expression in STEPS[template]:
        words = expression.split()
        terms = [names[w] if w in names else Number(w) for w in words[::2]]
        ops = words[1::2]
        if set(ops) <= {"+"} or set(ops) <= {"-"}:
            text = chain(ops[0], terms)
            value = sum(terms) if ops[0] == "+" else terms[0] - sum(terms[1:])
        else:
            text, value = ONE_STEP[ops[0]](terms[0], terms[1])
            for op, term in zip(ops[1:], terms[2:], strict=True):
                more, value = ONE_STEP[op](value, term)
                text += "," + more
        names[label] = value
        lines.append(f"{label.replace('_', ' ')}: {text}")
    if value != Number(answer):
        raise ValueError(f"template {template}: the steps give {show(value)}, reasoning-gym {answer}: {question}")
    return "\n".join([*lines, f"#### {answer}"])
